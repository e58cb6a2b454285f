"""docs/schema/ matches the types, and outputs match the schemas. `tests/conftest.py` checks the
output of every command that a test runs with --json."""

import json
import shutil

import jsonschema
import pytest

from docs.schemas import OUTPUTS, file_name, pages
from paralab.analyse.compare import comparison_of
from paralab.analyse.result import result_of
from paralab.errors import UsageError
from paralab.record.folder import SCHEMA_VERSION
from tests.conftest import ROOT, check_schema

RUNS = ROOT / "tests" / "runs"


def test_the_published_schemas_are_up_to_date():
    wanted = pages()
    files = {path.name: path.read_text() for path in (ROOT / "docs" / "schema").iterdir()}
    old = sorted(name for name in files | wanted if files.get(name) != wanted.get(name))
    assert not old, "run `python3 tasks.py docs`"
    assert wanted.keys() == {file_name(output) for output in OUTPUTS}
    for text in wanted.values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))


@pytest.mark.parametrize("name", ["ddp", "pipeline", "killed", "scaled_nan"])
def test_a_result_matches_its_schema_and_wrong_ones_do_not(name):
    result = json.loads(json.dumps(result_of(RUNS / name).to_dict()))
    check_schema(["run", "--json"], json.dumps(result))
    for wrong in ({"new": 1}, {"steps": "six"}, {"metrics": None}):
        with pytest.raises(jsonschema.ValidationError):
            check_schema(["run", "--json"], json.dumps(result | wrong))
    del result["losses"]
    with pytest.raises(jsonschema.ValidationError):
        check_schema(["run", "--json"], json.dumps(result))


def test_a_comparison_matches_its_schema():
    found = comparison_of(RUNS / "low_precision").to_dict()
    check_schema(["compare", "--json"], json.dumps(found))


def test_cheap_commands(paralab):
    for arguments in (["env"], ["list"], ["plan", "ddp"], ["show", str(RUNS / "hybrid")]):
        assert paralab(*arguments, "--json").json
    assert paralab("run", "dddp", "--json").code == 2


@pytest.mark.parametrize(("name", "read"), [("ddp", result_of), ("low_precision", comparison_of)])
@pytest.mark.parametrize("version", [1, SCHEMA_VERSION + 1, None])
def test_the_error_for_another_schema_version_names_both_versions(tmp_path, name, read, version):
    folder = tmp_path / "run"
    shutil.copytree(RUNS / name, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema": version}))
    with pytest.raises(UsageError) as error:
        read(folder)
    assert f"version {version}," in error.value.problem
    assert f"version {SCHEMA_VERSION}." in error.value.problem
