"""README, CONTRIBUTING, and docs/ name only commands, options, files, and links that exist.

Docs rot when code moves. `paralab faults` and a renamed test file stayed in these pages until
someone typed them."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from paralab.analyse.metric_types import Metrics
from paralab.analyse.result import Result
from paralab.analyse.verify import Verified, VerifyResult
from paralab.cli.compare import _parse_configuration
from paralab.cli.main import main
from paralab.errors import UsageError
from paralab.plan.check import check
from paralab.plan.option import options_of as request_options
from paralab.plan.request import Request
from paralab.record.events import KINDS
from paralab.record.folder import SCHEMA_VERSION
from tests.conftest import ROOT
from tests.page_commands import PAGES, TOP_PAGES, code, commands

CATALOG = sorted((ROOT / "docs" / "doctor").glob("*.md"))  # generated
FOLDERS = ("paralab", "tests", "bench", "docs", "practicals", "examples")
FOREIGN = {  # options of torchrun, srun, tensorboard, tasks.py, and the scripts in examples/ and bench/
    *("--batch-size", "--cpus-per-task", "--gpus-per-task", "--gres", "--log-dir", "--logdir"),
    *("--lr", "--max-restarts", "--mem", "--nnodes", "--nproc-per-node", "--nproc_per_node"),
    *("--only", "--partition", "--quick", "--rdzv-backend", "--rdzv-endpoint", "--standalone"),
    "--fast",
    "--half",
    "--write",
}
# House style: one word for one thing, in American spelling.
AVOIDED = (
    r"\bset-ups?\b|\bcures?\b|\bcatalogue\b|optimis|utilis|any more|\bwhoever\b|all-reduce\(s\)"
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def options_of(command: click.Command) -> set[str]:
    return {"--help"}.union(*(parameter.opts for parameter in command.params))


def mistake_in(words: list[str]) -> str | None:
    """Return what click would reject in this command: a command, a strategy, or an option."""
    command: click.Command = main
    while isinstance(command, click.Group) and words:
        word, *words = words
        if word not in command.commands:
            return f"no command {word}"
        command = command.commands[word]

    ours = words[: words.index("--")] if "--" in words else words
    inner = [word for argument in ours if " " in argument for word in argument.split()]
    unknown = {
        option
        for word in (*ours, *inner)
        if (option := word.partition("=")[0]).startswith("--") and " " not in option
    } - options_of(command)
    return f"no option {', '.join(sorted(unknown))}" if unknown else None


@pytest.mark.parametrize("page", [*PAGES, *CATALOG], ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    mistakes = {
        " ".join(words): mistake
        for words in commands(page.read_text())
        if (mistake := mistake_in(words))
    }
    assert mistakes == {}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_an_option_alone_belongs_to_some_command(page: Path) -> None:
    known = set(FOREIGN)
    waiting: list[click.Command] = [main]
    while waiting:
        command = waiting.pop()
        known |= options_of(command)
        waiting += command.commands.values() if isinstance(command, click.Group) else []

    named = {
        option
        for line in code(page.read_text())
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", line)
    }
    assert named - known == set()


def requests_of(words: list[str]) -> list[Request]:
    """The configurations of a command that trains or plans, as the command itself parses them."""
    name, *arguments = words
    with main.commands[name].make_context(name, list(arguments)) as context:
        given = context.params
    names = {each.name for each in request_options(Request)} - {"replicas"} | (
        {"replicas"} if name != "scale" else set()
    )
    known = {key: value for key, value in given.items() if key in names and value is not None}
    if name == "compare":
        base = Request(strategy="single", **known)
        return [_parse_configuration(text, base) for text in given["configurations"]]
    return [Request(strategy=given["strategy"], **known)] if given["strategy"] != "all" else []


def complete(text: str) -> Iterator[list[str]]:
    """The commands that train or plan, without placeholders such as `…` or `N`."""
    for words in commands(text):
        whole = len(words) > 1 and "…" not in words and "N" not in " ".join(words).split()
        if words[0] in ("run", "plan", "compare", "scale", "tune", "verify") and whole:
            yield words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_configurations_can_run(page: Path) -> None:
    """tests/test_install.py runs shorter commands, and not those that need a GPU. The complete ones
    must be configurations that paralab accepts."""
    for words in complete(page.read_text()):
        for request in requests_of(words):
            check(request)


def test_a_configuration_that_can_never_run_is_found() -> None:
    (words,) = complete("`paralab compare single 'ddp --stages 2'` and `paralab run …`")
    single, wrong = requests_of(words)
    check(single)
    with pytest.raises(UsageError):
        check(wrong)


def test_a_command_that_is_gone_or_an_option_it_does_not_have_is_a_mistake() -> None:
    text = """
`paralab faults`
```
paralab show --all RUN  prints all of it, --what
```
```
$ paralab run ddp --replica 2   # two ranks
paralab gone
```
"""
    mistakes = [mistake_in(words) for words in commands(text)]
    assert mistakes == ["no command faults", None, "no option --replica"]
    assert (
        mistake_in(["compare", "ddp --replicas 2", "ddp --acumulate 4"]) == "no option --acumulate"
    )
    assert mistake_in(["doctor", "--try", "3", "--", "torchrun", "--nproc_per_node=2"]) is None


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors for the headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target

    without_outputs = re.sub(r"```\n\$ .*?```", "", text, flags=re.DOTALL)
    named = re.findall(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", without_outputs)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    generated = r"<!-- table -->.*?<!-- /table -->|```.*?```|`[^`\n]*`"
    text = re.sub(generated, "", page.read_text(), flags=re.DOTALL)
    assert re.findall(AVOIDED, text) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_outputs_show_no_path_of_the_machine_they_ran_on(page: Path) -> None:
    assert re.findall(r"(?<!\w)/(?:work|tmp|root|usr)/\S+", page.read_text()) == []


def test_the_readme_is_short_and_every_page_is_linked_from_it() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    assert [name(page) for page in TOP_PAGES[1:] if f"({name(page)})" not in text] == []


def test_every_image_is_used() -> None:
    text = "".join(page.read_text() for page in PAGES)
    docs = ROOT / "docs"
    images = [str(file.relative_to(docs)) for file in docs.glob("images/**/*.*")]
    assert [image for image in images if f"{image})" not in text] == []


def test_contributing_answers_30_questions() -> None:
    """Where is X? Each answer names files; test_links_and_files_exist checks that they exist."""
    rows = re.findall(
        r"^\| \d+ \| .+ \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 30
    files = [re.findall(r"`(\S+\.py)`", row) for row in rows]
    assert all(files)
    assert [path for row in files for path in row if not (ROOT / path).exists()] == []


def test_every_event_and_every_field_of_a_result_is_documented() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text()
    events, results = page.split("## The result")
    assert f"(schema {SCHEMA_VERSION})" in page
    assert [kind for kind in KINDS if f"`{kind}`" not in events] == []
    fields = {
        field.name
        for struct in (Result, VerifyResult, Verified)
        for field in msgspec.structs.fields(struct)
    }
    assert sorted(name for name in fields if f"`{name}`" not in results) == []

    measured = (ROOT / "docs" / "metrics.md").read_text()
    metrics = {field.name for field in msgspec.structs.fields(Metrics)}
    assert sorted(name for name in metrics if f"`{name}" not in measured) == []
