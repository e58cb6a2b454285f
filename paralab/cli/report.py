"""How a comparison ends: write its page, then print the result as JSON or as a table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from paralab.show.visible import echo


def report(result: dict[str, Any], as_json: bool) -> None:
    """Exit with 1 if every configuration failed."""
    from paralab.show.document import print_summary
    from paralab.show.open_folder import document_of
    from paralab.show.page import write_report

    folder = Path(result["run_folder"])
    document = document_of(folder)
    page = write_report(folder, document)

    if as_json:
        findings = [asdict(finding) for finding in document.findings]
        click.echo(json.dumps({**result, "findings": findings, "report": str(page)}))
    else:
        print_summary(document)
        echo(f"Finished in {result['seconds']:.0f} s. All tables and charts: {page}")
    if all(row["error"] for row in result.get("rows", [{"error": None}])):
        sys.exit(1)
