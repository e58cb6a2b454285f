"""Hooks of `mkdocs build`: add the pages that are not files in docs/, and adapt links.

These pages are the home page (README.md), contributing, the API, the list of JSON schemas, the
notebooks, and each source file that some page links to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.website.api_page import api_page
from docs.website.links import ROOT, file_of, place_of, rewrite, targets
from docs.website.notebook_page import notebook_page

PICTURE = re.compile(r'<img [^>]*src="(?!data:)([^"]+)"[^>]*>')
SCHEMAS = "# JSON schemas\n\nThe schema of each command's `--json` output, as `docs/schemas.py` writes it.\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in list(extra_pages(files)):
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    file = file_of(page.file.src_uri)
    return rewrite(markdown, file) if (ROOT / file).is_file() else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link each picture to its file. On a phone it scrolls, and a link has the keyboard's focus."""
    return PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the theme's search dialog for screen readers."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def extra_pages(files: Files) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page that is not a file in docs/."""
    yield "index.md", (ROOT / "README.md").read_text("utf-8")
    yield "contributing.md", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    yield "api.md", api_page()
    schemas = sorted((ROOT / "docs" / "schema").glob("*.json"))
    yield "schema/index.md", SCHEMAS + "".join(f"\n- [{s.stem}]({s.name})" for s in schemas)
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        yield f"notebooks/{notebook.stem}.md", notebook_page(notebook)
    yield from source_pages(files)


def source_pages(files: Files) -> Iterator[tuple[str, str]]:
    """Yield a page for each file outside docs/ that some page links to."""
    written = ["README.md", "CONTRIBUTING.md"]
    written += [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    linked = {
        target
        for file in written
        for target in targets((ROOT / file).read_text("utf-8"), file)
        if (place := place_of(target)) and place.startswith("source/")
    }
    for file in sorted(linked):
        text = (ROOT / file).read_text("utf-8")
        kind = file.rpartition(".")[2]
        yield f"source/{file}.md", f"# {file}\n\n````{kind}\n{text}````\n"
