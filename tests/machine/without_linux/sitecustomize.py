"""Hide Linux facilities from Python in every process that has this folder on its PYTHONPATH.

This is as close to macOS as a Linux machine gets: code that needs a hidden facility fails here as
it would there. psutil may still read /proc, because on macOS it asks the system in a different
way.
"""

import builtins
import io
import os
import platform
import select
import signal
import socket
import sys
import types

HIDDEN_NAMES = {
    os: "pidfd_open sched_getaffinity sched_setaffinity posix_fallocate pipe2 eventfd memfd_create "
    "copy_file_range splice O_TMPFILE",
    socket: "SOCK_SEQPACKET MSG_NOSIGNAL SOCK_CLOEXEC SO_PEERCRED",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGRTMIN SIGRTMAX SIGSTKFLT",
    select: "epoll",
}
HIDDEN_FOLDERS = ("/proc", "/sys", "/dev/shm")
# torch finds its libraries by the system's name.
EXEMPT = (f"{os.sep}psutil{os.sep}", f"{os.sep}torch{os.sep}")


def _is_exempt():
    caller = sys._getframe(2).f_code.co_filename
    return any(part in caller for part in EXEMPT)


def _hide_folders(module, name):
    real = getattr(module, name)

    def masked(path, *args, **options):
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if str(text).startswith(HIDDEN_FOLDERS) and not _is_exempt():
            raise FileNotFoundError(2, "hidden by the test", text)
        return real(path, *args, **options)

    setattr(module, name, masked)


for _module, _names in HIDDEN_NAMES.items():
    for _name in _names.split():
        if hasattr(_module, _name):
            delattr(_module, _name)
for _module, _name in (
    (builtins, "open"),
    (io, "open"),
    (os, "open"),
    (os, "stat"),
    (os, "scandir"),
    (os, "listdir"),
    (os, "readlink"),
):
    _hide_folders(_module, _name)

# These look for files on the real system, so they must see its real name.
import sysconfig  # noqa: E402

import psutil  # noqa: E402, F401

sysconfig.get_config_vars()

_real_system = platform.system
platform.system = lambda: _real_system() if _is_exempt() else "Darwin"
sys.platform = "darwin"
sys.modules["_scproxy"] = types.SimpleNamespace(  # urllib imports this there
    _get_proxy_settings=dict, _get_proxies=dict
)
