"""Answer a question from the launcher (`paralab.launch.questions`).

python -m MODULE ANSWER.json QUESTION.json          (of several processes, rank 0 writes the answer)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from paralab.machine.signals import leave_to_the_launcher
from paralab.worker.processes.parent_watch import end_with_the_parent


def answer(reply: Callable[[Any], Any]) -> NoReturn:
    """Write `reply`'s answer to the question, and exit."""
    leave_to_the_launcher()
    end_with_the_parent()
    value = reply(json.loads(Path(sys.argv[2]).read_text()))
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[1]).write_text(json.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # exit without waiting for the thread that watches the parent
