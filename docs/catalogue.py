"""Write docs/doctor/ from the doctor's catalog, one page per failure: `python3 tasks.py docs`."""

from __future__ import annotations

from pathlib import Path

from paralab.doctor.show.entry import pages

FOLDER = Path(__file__).parent / "doctor"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(wanted)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
