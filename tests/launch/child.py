"""Print facts about this process, then wait until standard input closes."""

import json
import os
import signal
import sys
import time

import torch


def main():
    told = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "threads": torch.get_num_threads(),
    }
    told |= {
        "arguments": sys.argv[1:],
        "given": os.environ.get("GIVEN"),
        "taken": os.environ.get("TAKEN"),
    }
    told |= {
        "random": __import__("random").random(),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    }
    print(json.dumps(told), flush=True)
    if sys.argv[1:] == ["fail"]:
        raise ValueError("as asked")
    if sys.argv[1:] == ["hold"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    os.read(0, 1)
    os._exit(7)


if __name__ == "__main__":
    main()
