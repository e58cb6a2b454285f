"""The command refuses a wrong folder or a used port before it announces an address."""

import json
import socket

import pytest
from click.testing import CliRunner

from paralab.cli.main import main
from tests.serve.conftest import WITHOUT

pytest.importorskip("uvicorn", reason=WITHOUT)


def refused(*words):
    done = CliRunner().invoke(main, ["serve", *words, "--json"])
    assert done.exit_code == 2
    return json.loads(done.stdout)


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    assert "missing" in refused(str(tmp_path / "missing"))["error"]
    (tmp_path / "file").write_text("")
    assert "file" in refused(str(tmp_path / "file"))["error"]


def test_a_port_in_use_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(str(tmp_path), "--port", str(port))["error"]
    assert "65536" in refused(str(tmp_path), "--port", "65536")["error"]
