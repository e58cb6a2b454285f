"""Show a failure in the catalog: in the terminal (`doctor --explain`), and as a page for
docs/doctor/ and SARIF."""

from typing import get_args

from rich.text import Text

from paralab.doctor.catalog import ENTRIES, GROUPS, checked_ids
from paralab.doctor.registry import Entry, Source
from paralab.doctor.show.findings import DIFF_STYLES
from paralab.show.console import console, fact_table, plain_table, show_table

WAYS: dict[Source, str] = {
    "script": "reading the script",
    "ranks": "watching the ranks",
    "log": "reading logs",
    "run": "reading a recorded run",
    "machine": "checking the machine",
}
assert WAYS.keys() == set(get_args(Source))


def print_entry(entry: Entry) -> None:
    console.print(Text.assemble((entry.id, "bold"), f"  {entry.title}"), soft_wrap=True)
    ways = [words for way, words in WAYS.items() if entry.id in checked_ids(way)]
    table = fact_table()
    for name, words in (("symptom", entry.symptom), ("cause", entry.cause), ("fix", entry.fix)):
        table.add_row(name, Text(words))
    table.add_row("found by", ", ".join(ways) or "no check yet")
    if entry.silent:
        table.add_row("", "no other tool reports it on a plain PyTorch script")
    if entry.limits:
        table.add_row("limits", Text(entry.limits))
    if entry.sources:
        table.add_row("reported", Text(", ".join(entry.sources)))
    show_table(table)
    console.print()
    for line in entry.example.splitlines():
        console.print(Text(f"  {line}", style=DIFF_STYLES.get(line[:1], "")), soft_wrap=True)


def print_titles() -> None:
    for group, entries in _by_group():
        console.print(f"[bold]{group}[/]")
        table = plain_table("id", "title", header=False)
        for entry in entries:
            table.add_row(f"  {entry.id}", entry.title)
        show_table(table)


def _by_group() -> list[tuple[str, list[Entry]]]:
    of = {
        group: [entry for entry in ENTRIES.values() if entry.id[0] == letter]
        for letter, group in GROUPS.items()
    }
    return [(group, entries) for group, entries in of.items() if entries]


def page(entry: Entry) -> str:
    """Return the Markdown page of a failure."""
    parts = [
        f"# {entry.id} {entry.title}",
        f"**Symptom.** {entry.symptom}",
        f"**Cause.** {entry.cause}",
        f"**Fix.** {entry.fix}",
        f"```diff\n{entry.example}```",
    ]
    if entry.silent:
        parts.append("We know of no other tool that reports this failure for plain PyTorch.")
    if entry.limits:
        parts.append(f"**Limits.** {entry.limits}")
    if entry.sources:
        links = ", ".join(f"[{source}]({url(source)})" for source in entry.sources)
        parts.append(f"Reported in {links}.")
    comment = f"# paralab: ignore[{entry.id}] reason"
    parts.append(f"To silence this finding on one line, write `{comment}`.")
    return "\n\n".join(parts) + "\n"


def url(source: str) -> str:
    """Return the URL of `pytorch/pytorch#33148`. GitHub redirects issues to pull requests."""
    repository, number = source.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def pages() -> dict[str, str]:
    about = (
        f"{len(ENTRIES)} ways in which parallel training goes wrong. [The doctor](../doctor.md) "
        f"lists which source finds which failure."
    )
    about += " †: we know of no other tool that reports it for plain PyTorch."
    index = ["# The catalog", "", about, ""]
    for group, entries in _by_group():
        lines = [
            f"- [{entry.id}]({entry.id}.md) {entry.title}{' †' if entry.silent else ''}"
            for entry in entries
        ]
        index += [f"## {group}", "", *lines, ""]
    back = "\n[All entries](README.md)\n"
    return {"README.md": "\n".join(index)} | {
        f"{entry.id}.md": page(entry) + back for entry in ENTRIES.values()
    }
