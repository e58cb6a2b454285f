"""Finish a comparison: write its page, then print the result as JSON or as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.analyse.compare import Comparison
    from paralab.analyse.tune import TuneResult


def report(result: Comparison | TuneResult, as_json: bool) -> None:
    """Print the result; exit with 1 if every configuration failed."""
    from paralab.analyse.compare import Comparison
    from paralab.show.document import print_summary
    from paralab.show.open_folder import document_of
    from paralab.show.page import write_report

    folder = Path(result.run_folder)
    document = document_of(folder)
    page = write_report(folder, document)

    if as_json:
        printed = replace(result, findings=document.findings, report=str(page))
        click.echo(json.dumps(printed.to_dict()))
    else:
        print_summary(document)
        echo(f"Finished in {result.seconds:.0f} s. All tables and charts: {page}")
    if isinstance(result, Comparison) and not result.rows:
        sys.exit(1)
