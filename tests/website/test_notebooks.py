"""The notebooks are stored without outputs, and they run."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from docs.website.notebook_page import notebook_page
from tests.conftest import DEADLINE_SECONDS, ROOT

FOLDER = ROOT / "docs" / "notebooks"
# Notebook -> variable -> the type of the result that a cell shows
RESULTS = {
    "tour": {"result": "Result", "check": "VerifyResult", "comparison": "Comparison"},
    "practical5": {"sheet": "Document"},
}
SHOWN = "text/html"


def test_every_notebook_is_tested():
    assert {file.stem for file in FOLDER.iterdir()} == set(RESULTS)


@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_is_stored_without_outputs(name):
    path = FOLDER / f"{name}.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 3
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(
        cells
    )
    page = notebook_page(path)
    assert page.startswith("# ")
    assert [source for cell in cells if (source := "".join(cell["source"])) not in page] == []


@pytest.mark.processes
@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_runs_and_shows_its_results(tmp_path, name):
    # Import here, because the quick tests should not need the notebook packages.
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    variables = RESULTS[name]
    types = f"{{name: type(globals()[name]).__name__ for name in {list(variables)}}}"
    notebook.cells.append(nbformat.v4.new_code_cell(types))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=DEADLINE_SECONDS, resources=resources).execute()

    *cells, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert ast.literal_eval(last.outputs[0].data["text/plain"]) == variables
    shown = {cell.source.splitlines()[-1]: _html(cell) for cell in cells if _html(cell)}
    assert list(shown) == list(variables)
    assert [name for name, html in shown.items() if "<table" not in html] == []


def _html(cell: Any) -> str:
    """Return the HTML that a cell's last expression shows."""
    return "".join(each.data.get(SHOWN, "") for each in cell.outputs if "data" in each)
