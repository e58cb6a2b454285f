"""The command line: the group of all commands. Errors are printed only here.

Each command has its own file, which parses the options, calls the library, and prints the result.
These files never import torch.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from paralab import __version__
from paralab.cli.checkpoint import checkpoint
from paralab.cli.command import WIDTH, Group, as_usage_error, wants_json
from paralab.cli.compare import compare
from paralab.cli.doctor import doctor
from paralab.cli.env import env
from paralab.cli.list import list_
from paralab.cli.plan import plan
from paralab.cli.practical import practical
from paralab.cli.run import run
from paralab.cli.scale import scale
from paralab.cli.serve import serve
from paralab.cli.show import show
from paralab.cli.streams import make_safe as make_streams_safe
from paralab.cli.tune import tune
from paralab.cli.verify import verify
from paralab.errors import ParalabError, UsageError, from_os_error
from paralab.launch.processes import import_torch_once
from paralab.machine.signals import ENDS, interrupted, number_of, raise_stop, set_handlers
from paralab.show.visible import echo

# Let rank 0 print its error first, because torchrun kills all ranks after an exit.
RANK_0_SECONDS = 2.0


class Commands(Group):
    """Prints errors without a traceback: what is wrong, why, and what to write instead."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        make_streams_safe()
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and turn each expected exception into a message and an exit code."""
        set_handlers(dict.fromkeys(ENDS, raise_stop))
        if "SLURM_JOB_ID" in os.environ:
            # Slurm may send this before the time limit. A run without checkpoints ignores it.
            signal.signal(signal.SIGUSR1, lambda number, frame: None)

        try:
            with import_torch_once(), _flushing():
                return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise  # click prints the help
        except click.UsageError as error:
            _leave_it_to_rank_0()
            _exit_with(ctx, as_usage_error(error, ctx))
        except ParalabError as error:
            if isinstance(error, UsageError):
                _leave_it_to_rank_0()
            _exit_with(ctx, error)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `| head` closed the pipe: click exits silently
                raise
            _exit_with(ctx, from_os_error(error))
        except click.Abort:  # Ctrl-C or Ctrl-D at a question
            _exit_with(ctx, interrupted(signal.SIGINT, " at a question; no process has started."))
        except KeyboardInterrupt as stop:
            _exit_with(ctx, interrupted(number_of(stop), "; all processes have ended."))


def _leave_it_to_rank_0() -> None:
    """Exit silently in a launched rank other than 0, because it raises the same error as rank 0."""
    from paralab.launch.launched_by import detect_launcher

    with suppress(UsageError):  # in a broken environment, a rank cannot tell whether it is rank 0
        launched = detect_launcher()
        if launched and launched.rank:
            with suppress(KeyboardInterrupt):
                time.sleep(RANK_0_SECONDS)
            sys.exit(UsageError.exit_code)


def _exit_with(context: click.Context, error: ParalabError) -> NoReturn:
    if wants_json(context):
        printed = {"error": error.problem, "detail": error.detail, "fix": error.fix}
        with suppress(OSError):  # stdout itself may not be writable
            click.echo(json.dumps(printed))
    echo(f"paralab: {error}", err=True)
    sys.exit(error.exit_code)


@contextmanager
def _flushing() -> Iterator[None]:
    """Treat output that cannot be written as an error, even if the failure appears only on
    flush."""
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
@click.version_option(__version__, prog_name="paralab")
def main() -> None:
    """A laboratory for parallel training in PyTorch.

    Point it at a model. It trains the model on one device and with ten parallel strategies, which
    `paralab list` describes. It shows what each rank and device did, and checks that all strategies
    train the same way.

    \b
    paralab compare --workload gpt              measure eight configurations and write a page
    paralab compare --workload my.py:workload   compare strategies on your own model
    paralab run ddp --replicas 2 --live         train on two ranks and watch
    paralab verify all                          check every strategy against a single device
    paralab serve                               watch your runs in a browser
    paralab practical 5                         run a course practical
    paralab doctor train.py                     find mistakes in any training script
    """


_shown = run, compare, scale, tune, verify, plan, show, serve, list_, env
for _command in (*_shown, practical, checkpoint, doctor):
    main.add_command(_command)
