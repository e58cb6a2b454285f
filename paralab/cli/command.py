"""Click classes for all commands: they group options under headings and remember `--json`."""

from typing import Any

import click

from paralab.errors import UsageError

WIDTH = 100  # the maximum length of a help line
FLAG_COLUMN = 30  # the help of a longer option starts on the next line
OTHER = "Other"
JSON = "paralab.json"
NO_BREAK = "\u00a0"  # a space at which a help line must not break


class Option(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *arguments: Any, heading: str = OTHER, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.heading = heading

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Omit click's range notes such as `[x>=1]`."""
        record = super().get_help_record(ctx)
        return record and (record[0], record[1].partition("  [")[0])


class Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember `--json` before parsing, so that an error in the options is also printed as
        JSON.

        Everything after `--` belongs to the watched command.
        """
        own = args[: args.index("--")] if "--" in args else args
        ctx.meta[JSON] = "--json" in own
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click's parser does not always name the command
            raise

    def get_help(self, ctx: click.Context) -> str:
        return super().get_help(ctx).replace(NO_BREAK, " ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per heading, with the flags of all sections in one column."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                heading = getattr(parameter, "heading", OTHER)
                sections.setdefault(heading, []).append(record)

        if len(sections) == 1:  # a single heading adds no information
            sections = {"Options": sections.popitem()[1]}
        if OTHER in sections:
            sections[OTHER] = sections.pop(OTHER)  # comes last

        flags = [len(flag) for records in sections.values() for flag, _ in records]
        width = max(length for length in flags if length <= FLAG_COLUMN)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(flag.ljust(width), text) for flag, text in records], width)


class Group(click.Group):
    """Lists its commands in the order of their registration."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def wants_json(context: click.Context) -> bool:
    return bool(context.meta.get(JSON))


def as_usage_error(error: click.UsageError, context: click.Context) -> UsageError:
    """Say what is wrong with a number, and what to write instead. For other mistakes, keep click's
    message."""
    parameter = error.param if isinstance(error, click.BadParameter) else None
    flag, kind = (parameter.opts[0], parameter.type) if parameter else ("", None)
    given, _, expected = error.message.replace("'", "").partition(" is not ")
    if expected.startswith("a valid integer"):
        return UsageError(f"{flag} {given} is not a whole number.", fix=f"{flag} 2")
    if expected.startswith("a valid float"):
        return UsageError(f"{flag} {given} is not a number.", fix=f"{flag} 1.5")
    if isinstance(kind, click.IntRange | click.FloatRange) and expected:
        bounds = f"{kind.min:g} or more" if kind.max is None else f"{kind.min:g} to {kind.max:g}"
        bounds = f"a number greater than {kind.min:g}" if kind.min_open else bounds
        return UsageError(f"{flag} {given} is out of range.", fix=f"{flag} with {bounds}")
    return UsageError(error.format_message(), fix=f"{(error.ctx or context).command_path} --help")
