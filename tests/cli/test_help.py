"""The help of every command: headings, widths, and options that survive a round trip through the
command line."""

import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from paralab import __main__ as entry
from paralab.cli.command import Command
from paralab.cli.main import main
from paralab.cli.options import omit_none, take
from paralab.cli.run import run
from paralab.launch.run_options import RunOptions
from paralab.plan.option import options_of, to_words
from paralab.plan.request import Request


def commands(group=main, words=()):
    for name, command in group.commands.items():
        yield " ".join([*words, name]), command
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))


COMMANDS = dict(commands())


def help_of(words):
    done = CliRunner(env={"COLUMNS": "300"}).invoke(main, [*words.split(), "--help"])
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("words", ["", *COMMANDS])
def test_help_fits_into_100_columns(words):
    lines = help_of(words).splitlines()
    assert [line for line in lines if len(line) > 100] == []
    assert [line for line in lines if line.endswith("...") and "Usage" not in line] == []


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_has_help_that_is_a_sentence(words):
    for option in COMMANDS[words].params:
        if isinstance(option, click.Option):
            assert re.search(r"\.( \[default:[^]]+\])?$", option.help or ""), option.name


def test_run_lists_its_options_under_headings():
    headings = re.findall(r"^(\w.*):$", help_of("run"), re.MULTILINE)
    assert headings == [
        "Model and data",
        "Parallelism",
        "Precision",
        "DDP",
        "Training length",
        "Devices",
        "Output",
        "Checkpoints and restarts",
        "Launching",
        "Slurm",
        "Other",
    ]


def test_every_command_that_computes_something_knows_json():
    for words, command in COMMANDS.items():
        if isinstance(command, Command):
            assert "as_json" in {parameter.name for parameter in command.params}, words


def example(option):
    """Return a value other than the default."""
    if option.choices:
        return next(choice for choice in reversed(option.choices) if choice != option.default)
    examples = {int: 7, float: 0.1234567, str: "some 'quoted' text", bool: True, Path: Path("a b")}
    return examples[option.kind]


def parse(words):
    """Parse the words after `paralab run`; return the request and the run options."""
    options = run.make_context("run", list(words)).params
    strategy = options.pop("strategy")
    chosen = RunOptions(**take(RunOptions, options))
    known = {field.name for field in fields(Request)}
    asked = {name: value for name, value in omit_none(options).items() if name in known}
    return Request(strategy, **asked), chosen


@pytest.mark.parametrize("option", options_of(Request), ids=lambda option: option.name)
def test_every_field_of_a_request_survives_the_round_trip_through_words(option):
    request = Request("ddp", **{option.name: example(option)})
    assert getattr(request, option.name) != option.default
    words = to_words(request)
    assert words[0] == option.flag
    assert parse(["ddp", *words]) == (request, RunOptions())


@pytest.mark.parametrize("option", options_of(RunOptions), ids=lambda option: option.name)
def test_every_run_option_survives_the_round_trip_through_words(option):
    chosen = RunOptions(**{option.name: example(option)})
    assert parse(["ddp", *to_words(chosen)]) == (Request("ddp"), chosen)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["run", "ddp", "--replica", "2"], "--replicas"),
        (["compare", "ddp --acumulate 2"], "--accumulate"),
        (["doctor", "--explian", "G01"], "--explain"),
        (["run", "ddp", "--precision", "fp61"], "fp64"),
        (["run", "dpp"], "dp"),
        (["comapre"], "compare"),
    ],
)
def test_a_misspelled_name_gets_the_nearest_right_one(words, nearest):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert done.stderr.startswith("paralab: ")
    assert re.search(rf"Did you mean.*{nearest}\b", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["run", "ddp", "--replicas", "two"], "--replicas two", "--replicas 2"),
        (["run", "ddp", "--replicas", "1.5"], "--replicas 1.5", "--replicas 2"),
        (["run", "ddp", "--bucket-mb", "-1"], "--bucket-mb -1 ", "greater than 0"),
        (["run", "ddp", "--bucket-mb", "big"], "--bucket-mb big", "--bucket-mb 1.5"),
        (["compare", "--rounds", "0"], "--rounds 0", "1 or more"),
        (["tune", "--trials", "3"], "--trials 3", "4 or more"),
        (["serve", "--port", "70000"], "--port 70000", "0 to 65535"),
        (["doctor", "--stall", "0", "--", "x"], "--stall 0", "greater than 0"),
        (["doctor", "--explain"], "--explain", " doctor --help"),
    ],
)
def test_a_wrong_number_is_repeated_with_what_to_write_instead(words, problem, fix):
    done = CliRunner().invoke(main, words)
    first, _, second = done.stderr.partition("\nTry: ")
    assert done.exit_code == 2
    assert problem in first
    assert fix in second


@pytest.mark.parametrize(
    "words",
    [
        ["run", "dpp"],  # our own error
        ["run", "ddp", "--steps", "many"],  # an error that click finds
        ["run", "ddp", "--no-such-option"],
        ["checkpoint", "list", "nowhere"],  # of a command in a group
    ],
)
def test_an_error_is_json_if_the_command_was_asked_for_json(words):
    asked = CliRunner().invoke(main, [*words, "--json"])
    assert json.loads(asked.stdout).keys() == {"error", "detail", "fix"}
    assert asked.exit_code == 2
    assert CliRunner().invoke(main, words).stdout == ""


def test_json_after_two_dashes_belongs_to_the_watched_command():
    done = CliRunner().invoke(main, ["doctor", "--try", "0", "--", "train", "--json"])
    assert (done.exit_code, done.stdout) == (2, "")


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch, capsys):
    """It once printed a traceback of the module that was being imported."""

    class Importing(SimpleNamespace):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(entry.sys.modules, "paralab.cli.main", Importing())
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
