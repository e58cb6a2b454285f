"""Write docs/schema/, the JSON Schema of every `--json` output: `python3 tasks.py docs`."""

from __future__ import annotations

import json
from pathlib import Path

from paralab.cli.schemas import OUTPUTS, file_name, schema_of

FOLDER = Path(__file__).parent / "schema"


def pages() -> dict[str, str]:
    """Return file name -> content."""
    return {
        file_name(output): json.dumps(schema_of(output), indent=1, ensure_ascii=False) + "\n"
        for output in OUTPUTS
    }


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
