"""Run folders, logs, scripts, and checkpoints from someone else: the terminal executes no escape
sequence in them, and pages and sheets contain none of their HTML.

`show` once printed escape sequences from a run folder, and `--markdown` wrote raw HTML."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from rich.table import Table
from rich.text import Text

from paralab.analyse.blocks import Answer, Cell, Document, Finding, Section
from paralab.analyse.blocks import Table as TableBlock
from paralab.course.sheet_text import parse
from paralab.record.checkpoints import step_folder
from paralab.show.console import VisibleConsole
from paralab.show.markdown import as_markdown, safe
from tests.conftest import ROOT

HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>"
ATTACK = f"\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f\u202e\u2028{HTML}|[/x][red][a](javascript:x)\ud800"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]")
# These fields say how to read the rest; an unknown value there is an error that names it.
STRUCTURE = {("kind",), ("event",), ("plan", "schedule"), ("configurations", "*", "runs", "*")}


def planted(value, spared, path=()):
    if isinstance(value, dict):
        return {key: planted(item, spared, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [planted(item, spared, (*path, "*")) for item in value]
    return value + ATTACK if isinstance(value, str) and path not in spared else value


def foreign(name, folder, spared):
    shutil.copytree(ROOT / "tests" / "runs" / name, folder)
    for path in folder.rglob("*.json*"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text(
            "".join(json.dumps(planted(json.loads(line), spared)) + "\n" for line in lines)
        )
    for path in folder.rglob("*.txt"):
        path.write_text(path.read_text() + ATTACK.replace("\ud800", "") + "\n")


def printed(*arguments, cwd):
    """Run a command; return the exit code and all output."""
    command = [sys.executable, "-m", "paralab", *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=200,
    )
    text = (done.stdout + done.stderr).decode()
    assert "Traceback" not in text
    assert not CONTROL.search(text)
    return done.returncode, text


@pytest.mark.parametrize("name", ["ddp", "killed", "low_precision"])
@pytest.mark.processes
def test_a_foreign_run_folder_is_escaped_in_the_terminal_and_on_the_page(tmp_path, name):
    foreign(name, tmp_path / "run", STRUCTURE)
    code, text = printed(
        "show", "run", "--all", "--markdown", "sheet.md", "--report", "page.html", cwd=tmp_path
    )
    assert code == 0
    assert "␛]0;title" in text  # visible, not omitted
    assert printed("show", "run", cwd=tmp_path)[0] == 0
    for written, link in (("sheet.md", r"|\]\(javascript"), ("page.html", "|href=.javascript")):
        content = (tmp_path / written).read_text()
        assert "onerror" in content
        assert not re.search(f"<script>alert|<img{link}", content)
        assert not CONTROL.search(content)


@pytest.mark.processes
def test_errors_escape_the_names_they_quote(tmp_path):
    foreign("low_precision", tmp_path / "run", spared=set())
    code, text = printed("show", "run", cwd=tmp_path)
    assert code == 2
    assert "title" in text


@pytest.mark.processes
def test_the_doctor_escapes_foreign_runs_scripts_and_logs(tmp_path):
    foreign("killed", tmp_path / "run", STRUCTURE)
    attack = ATTACK.replace("\ud800", "").replace("\r", "").replace("\u2028", "")
    script = "import torch.distributed as dist\ndist.init_process_group('nccl')\nif dist.get_rank() == 0:\n    dist.barrier()"
    (tmp_path / "train.py").write_text(
        script.replace(")\n", f")  # {attack}\n") + f"  # {attack}\n"
    )
    (tmp_path / "log.txt").write_text(
        f"[rank1]: {attack}\n[rank1]: RuntimeError: {attack} Address already in use\n"
    )
    code, text = printed("doctor", "run", "train.py", "log.txt", cwd=tmp_path)
    assert code == 1
    assert "␛]0;title" in text


@pytest.mark.processes
def test_checkpoint_list_escapes_its_text(tmp_path):
    folder = step_folder(tmp_path, 2)
    folder.mkdir()
    (folder / f"{ATTACK[:20]}.distcp").write_bytes(b"")
    files = {
        name: {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
        for name in (f"{ATTACK[:20]}.distcp", ".metadata")
    }
    about = {
        "step": 2,
        "samples_seen": 16,
        "created": ATTACK,
        "topology": {"strategy": ATTACK, "world_size": 2},
        "files": files,
    }
    own = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(about | {"sha256": own}))
    (folder / ".metadata").write_bytes(b"")
    assert "␛]0;title␇" in printed("checkpoint", "list", ".", cwd=tmp_path)[1]
    (folder / f"{ATTACK[:20]}.distcp").unlink()
    code, text = printed("checkpoint", "verify", ".", cwd=tmp_path)
    assert code == 1
    assert "␛]0;title␇" in text


def test_the_terminal_gets_only_our_own_escapes():
    file = io.StringIO()
    console = VisibleConsole(file=file, force_terminal=True, width=200, color_system="standard")
    table = Table(title=Text(ATTACK))
    table.add_row(Text(ATTACK))
    console.print(table, style="red")
    console.print(ATTACK, markup=False)
    text = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    assert not CONTROL.search(text)
    assert "\x1b[" in file.getvalue()  # colors stay


def test_markdown_is_escaped_and_read_back():
    title = f"a | b {HTML} [x](javascript:y) \\| \\< end"
    table = TableBlock(
        title, ("set-up", title), ((Cell("one"), Cell(f"{title}\nnext line")),), note=title
    )
    section = Section(f"Part 1: {title}", (table, Answer(title, title, {})), text=title)
    text = as_markdown(
        Document(title, title, (Finding("warning", title, {}),), (section,), ((title, title),))
    )
    assert not re.search(r"<|\]\(", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in rows] == [3, 3, 3]
    read = parse(text)
    assert list(read) == [1]
    assert read[1].tables[0][1:] == [["one", f"{title} next line"]]
    assert title in read[1].answers


@pytest.mark.parametrize(
    "given", ["plain", "1.45–2.11 (95 %)", "`--replicas 2` > 1", "[1, 2]", "A & B"]
)
def test_ordinary_text_is_unchanged(given):
    assert safe(given) == given
