"""The table of a comparison names the backend that moved the tensors."""

from types import SimpleNamespace

from paralab.analyse.report import _backends


def row(name, backend):
    return SimpleNamespace(name=name, backend=backend)


def test_one_backend_needs_no_names_and_two_do():
    single, ddp = row("single", None), row("ddp ×2", "local")
    assert _backends([single]) == ""
    assert _backends([single, ddp]) == ", over local"
    other = row("fsdp ×2", "gloo")
    assert _backends([single, ddp, other]) == ", over local (ddp ×2) and gloo (fsdp ×2)"
