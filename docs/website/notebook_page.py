"""A notebook as a Markdown page: its text, and its code in blocks."""

from __future__ import annotations

import json
from pathlib import Path


def notebook_page(notebook: Path) -> str:
    """Return the page. Notebooks are stored without outputs, so there are none to show."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    parts = [_cell(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    parts.insert(1, f"Open [{notebook.name}]({notebook.name}) in Jupyter to run it.")
    return "\n\n".join(parts) + "\n"


def _cell(kind: str, text: str) -> str:
    return f"```python\n{text}\n```" if kind == "code" else text
