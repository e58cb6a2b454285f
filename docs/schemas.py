"""Write docs/schema/, the JSON Schema of every `--json` output: `python3 tasks.py docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from paralab.cli.schemas import OUTPUTS, file_name

FOLDER = Path(__file__).parent / "schema"


def pages() -> dict[str, str]:
    """Return file name -> content."""
    return {
        file_name(output): json.dumps(schema_of(output), indent=1, ensure_ascii=False) + "\n"
        for output in OUTPUTS
    }


def schema_of(output: str) -> dict[str, Any]:
    """Return the JSON Schema for one output."""
    schema = msgspec.json.schema(OUTPUTS[output])
    title = "an error" if output == "error" else f"`paralab {output} --json`"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **_close(schema),
    }


def _close(schema: Any) -> Any:
    """Return the same schema, but reject fields that it does not list."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _close(value) for name, value in schema.items()}
    return closed | {"additionalProperties": False} if "properties" in schema else closed


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for old in FOLDER.glob("*.json"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(wanted)} schemas in {FOLDER}")


if __name__ == "__main__":
    main()
