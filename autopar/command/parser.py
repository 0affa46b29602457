"""Command lines with typer: parsing, help, shell completion, and the group `autopar`.

Typer commands are made from the option rows of `Command`; `autopar` is the group of all commands.
Importing typer costs 0.05 s of CPU, so other modules import this one late.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from autopar.cli import COMPLETION, SUBCOMMANDS
from autopar.command.aliases import alias_tables
from autopar.command.dialect import normalise
from autopar.command.fields import Row, missing
from autopar.command.run import guarded, say
from autopar.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from autopar.command.options import Command

HELP = ("--help", "-h", "--help-all")
SHELLS = ("bash", "zsh", "fish")
_PROFILE = "profile"
"""First word of the commands that measure."""
_NAMES: Mapping[str, str] = {
    "model": "model_names",
    "application": "model_names",
    "hardware": "card_names",
    "system": "card_names",
    "stack": "stack_names",
    "site": "site_names",
}
"""Option whose value may be a shipped name -> function of `autopar.documents.catalog` with the
names."""


class DialectCommand(TyperCommand):
    """A typer command that rewrites its words before typer parses them.

    Values stay texts here, because plan files store them as typed; `fields.read_values` converts
    them. The conversion of typer would build a pydantic adapter for every option (0.1 s of CPU for
    a search).
    """

    spec: Command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set the texts and flags of the given options as parameters of the context.

        ctx.obj : function that prints a notice about an option without effect

        Raises OptionError: an option is unknown or has no value, or a word is missing or
        superfluous.
        """
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        # Before any check, because help is also for incomplete command lines.
        place = next((i for i, word in enumerate(args) if word in HELP), None)
        if place is not None:
            every = args[place] == "--help-all"
            ctx.args = ["all"] if every else args[place + 1 : place + 2]
            sys.stdout.write(self.get_help(ctx) + "\n")
            ctx.exit()
        words, rows = args, self.spec.rows
        if args:
            words, notices = normalise(args, rows, alias_tables().families[self.spec.family])
            for notice in notices:
                ctx.obj(notice)
        found, rest, _ = self.make_parser(ctx).parse_args(args=words)
        # An absent argument is None, an empty tuple or a sentinel, depending on the version of
        # typer.
        values = {row.name: found.get(row.key) for row in rows}
        texts = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if isinstance(value, str | bool | list | tuple) and value != ()
        }
        places = [row for row in rows if row.positional]
        if rest:
            remedy = f"Give one {places[-1].label}" if places else "Begin options with --"
            named = _option_of(rest[0], {row.name for row in rows})
            raise OptionError(
                f"{rest[0]!r:.60}: unexpected argument",
                remedy=f"Use {named}" if named else f"{remedy}, see --help",
            )
        for row in places:
            if row.default is MISSING and row.name not in texts:
                raise missing(row)
        ctx.params = texts
        return []

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help on the words after `--help`."""
        formatter.write(self.spec.help_of(ctx.args))


def _option_of(word: str, known: Set[str]) -> str:
    """Return the option that a stray word is a value of, such as `--model llama3-8b`, or ""."""
    from autopar.documents import catalog  # late: only needed after an error

    if "model" in known and word in catalog.model_names():
        return f"--model {word}"
    if "hardware" in known and re.fullmatch(r"[A-Za-z0-9._-]+:[0-9]+x[0-9]+", word):
        return f"--hardware {word}"
    return ""


def typer_command(spec: Command) -> DialectCommand:
    """Return the typer command for the options of a command."""

    def call(**values: Any) -> dict[str, Any]:
        return values

    parameters = [_parameter(row) for row in spec.rows]
    # typer reads the signature. Made from the rows, it keeps one definition per option.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(spec.name, cls=DialectCommand)(call)
    command = typer.main.get_command(app)
    assert isinstance(command, DialectCommand)
    command.spec = spec
    return command


def _parameter(row: Row) -> inspect.Parameter:
    info: Any
    hint: Any = list[str] | None if row.kind == "texts" else str | None
    if row.positional:
        info = typer.Argument(None, help=row.help)
    elif row.flaglike:
        hint = bool | None
        text = f"--{row.name}/--no-{row.name}" if row.kind == "switch" else f"--{row.name}"
        info = typer.Option(None, text, help=row.help)
    else:
        info = typer.Option(None, f"--{row.name}", help=row.help, autocompletion=_words(row))
    return inspect.Parameter(row.key, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=hint)


def _words(row: Row) -> Callable[[str], list[str]] | None:
    """Return the completion of an option's value; None lets the shell complete files."""
    names = _NAMES.get(row.name)
    if names is None and not row.choices:
        return None

    def found(incomplete: str) -> list[str]:
        catalog = import_module("autopar.documents.catalog")
        known = list(row.choices) if names is None else getattr(catalog, names)()
        return [word for word in known if word.startswith(incomplete)]

    return found


# --------------------------------------------------------------------------------------------------
# The group `autopar`


class LazyGroup(TyperGroup):
    """Commands whose names begin with a prefix, each loaded when a command line names it.

    The options of a command are in its module, and importing all modules would take seconds.
    """

    prefix = ""
    """First word of a nested group with a blank, such as `profile `; empty for `autopar`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the words that may follow the prefix."""
        names = [name for name in SUBCOMMANDS if name.startswith(self.prefix)]
        return list(dict.fromkeys(name.removeprefix(self.prefix).split()[0] for name in names))

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand:
        """Return a command with help but without options, for the list of commands."""
        _, _, text = SUBCOMMANDS.get(self.prefix + cmd_name, ("", "", "measure, print and compare"))
        return TyperCommand(cmd_name, help=text, rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command or group named by the first word, and the other words."""
        word, *rest = args
        name = self.prefix + word
        if word not in self.list_commands(ctx):
            return None, None, args
        if name not in SUBCOMMANDS:
            inner = LazyGroup(name=word, rich_markup_mode=None)
            inner.prefix = f"{name} "
            return word, inner, rest
        module = import_module(SUBCOMMANDS[name][1])
        found = module.COMMAND.typed
        # The first word of some commands may name a model, which has separate options.
        if hasattr(module, "MODELS"):
            models = {model: one.command.typed for model, one in module.MODELS.items()}
            found = TyperGroup(name=word, commands=models, params=found.params)
        return word, found, rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Handle words that name no command: help, version, completion; or raise OptionError."""
        first = args[0] if args else "--help"
        if first == _PROFILE and args[1:2] and args[1] in HELP:
            sys.stdout.write(_PROFILE_HELP.format(commands="\n".join(_profile_commands())))
            ctx.exit()
        if ctx.resilient_parsing or first == "--install-completion":
            return super().parse_args(ctx, args)
        if first in ("--help", "-h", "help"):
            text = self.get_help(ctx)
        elif first == "--version":
            from autopar import __version__

            text = f"autopar {__version__}"
        elif first == "--show-completion":
            text = _script("".join(args[1:2]))
        else:
            raise _unknown(args)
        sys.stdout.write(text + "\n")
        ctx.exit()
        return []

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        formatter.write(_HELP.format(commands="\n".join(_grouped_commands())))


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Plan": ("search", "explain", "explore", "compare"),
    "Run": ("check", "export"),
    "Measure": (_PROFILE, "plan", "verify"),
    "List": ("models", "cards", "sites", "stacks"),
    "Other": ("estimate", "serve"),
}
"""Task -> commands, in the order of the help."""
_HELP = """\
usage: autopar COMMAND [OPTIONS]

Find the fastest parallel training configuration that fits in GPU memory.

{commands}

Options   --version, --show-completion SHELL, --install-completion
Start     autopar search --model llama3-8b --hardware h100:1x8
Run `autopar COMMAND --help` for its options. Commands are also installed under
their own names, such as autopar-search and profile-model.
"""
_PROFILE_HELP = """\
usage: autopar profile COMMAND [OPTIONS]

Measure a model or a cluster, or print, check and estimate profiles.

{commands}

Run `autopar profile COMMAND --help` for its options.
"""


def _grouped_commands() -> Iterator[str]:
    """Yield the lines of the commands by task; two short ones share a line."""
    for group, names in GROUPS.items():
        texts = {name: SUBCOMMANDS[name][2] for name in names if name != _PROFILE}
        texts[_PROFILE] = "measure model, hardware, site; estimate or show profiles"
        lines = [f"{name:<14}{texts[name]}" for name in names]
        if group == "List":
            lines = [
                f"{left:<36}{name:<8}{texts[name]}"
                for left, name in zip(lines[::2], names[1::2], strict=True)
            ]
        for index, line in enumerate(lines):
            yield f"{group if index == 0 else '':<10}{line}"


def _profile_commands() -> Iterator[str]:
    """Yield the lines of the commands after `autopar profile`."""
    for name, (_, _, text) in SUBCOMMANDS.items():
        if name.startswith(f"{_PROFILE} "):
            yield f"  {name.removeprefix(_PROFILE).strip():<12}{text}"


def run(arguments: Sequence[str]) -> int:
    """Run `autopar` with words that name no command, or for the completion script of a shell."""
    # typer registers its shells together with the completion options.
    app = typer.Typer(cls=LazyGroup, rich_markup_mode=None)
    app.callback()(lambda: None)
    group = typer.main.get_command(app)
    if COMPLETION in os.environ:
        group.main(prog_name="autopar")

    def answer() -> int:
        try:
            group.make_context("autopar", list(arguments))
        except typer.Exit as end:
            return end.exit_code
        return 0

    def told(sentence: str) -> None:
        # Messages about words already contain the name of the command; others do not.
        named = sentence.split(maxsplit=1)[0].rstrip(":") == "autopar"
        say(sentence if named else f"autopar: {sentence}")

    return guarded(answer, told)


def _script(shell: str) -> str:
    """Return the completion script of a shell; raises OptionError for an unknown shell."""
    # In typer since its first completion, although it is not exported.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        got = f"got {shell!r:.60}" if shell else "none is given"
        raise OptionError(f"autopar --show-completion: expected {', '.join(SHELLS)}, {got}")
    return get_completion_script(prog_name="autopar", complete_var=COMPLETION, shell=shell)


def _unknown(words: Sequence[str]) -> OptionError:
    """Return the error for a command line whose first words name no command."""
    if words[0] == "profile":
        inner = [name.split()[1] for name in SUBCOMMANDS if name.startswith("profile ")]
        return OptionError("autopar profile needs a second word", remedy=f"Use {', '.join(inner)}")
    hint = did_you_mean(words[0], SUBCOMMANDS, otherwise="See autopar --help")
    return OptionError(f"autopar: unknown command {words[0]!r:.60}", remedy=hint)
