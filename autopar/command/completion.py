"""Completion of words in shells: commands, options, and the names that options take.

typer knows the shells; here it is told what there is to complete. Values that are files are left
to the shell.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from autopar.command.fields import Row
from autopar.command.options import Command
from autopar.command.run import say
from autopar.entry import SUBCOMMANDS

if TYPE_CHECKING:
    import typer

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_AUTOPAR_COMPLETE"
"""What a script of ours sets when it asks for words."""
_NESTED: Mapping[str, tuple[str, ...]] = {
    "estimate": ("calculon", "tensor2d"),
    "explore": ("calculon", "tensor2d"),
}
"""Commands whose first word says which model; each has a module of its own."""
_NAMES: Mapping[str, Literal["models", "cards", "stacks", "sites"]] = {
    "model": "models",
    "application": "models",
    "hardware": "cards",
    "system": "cards",
    "stack": "stacks",
    "site": "sites",
}
"""Options that take a shipped name."""


def complete() -> None:
    """Answer the question of a shell's script; it ends the process."""
    # the line so far: the script of bash says it in the second variable, the others in the first
    asked = os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", ""))
    tree(asked.split()[1:])(prog_name="autopar", complete_var=VARIABLE)


def show(arguments: Sequence[str]) -> None:
    """Print the script that a shell evaluates; ends the process with 2 for an unknown shell."""
    # in typer since its first completion, though it does not say so
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    shell = arguments[0] if arguments else ""
    if shell not in SHELLS:
        got = f"got {shell!r:.60}" if shell else "none is given"
        say(f"autopar --show-completion: expected {', '.join(SHELLS)}; {got}")
        sys.exit(2)
    script = get_completion_script(prog_name="autopar", complete_var=VARIABLE, shell=shell)
    sys.stdout.write(script + "\n")


def tree(words: Sequence[str]) -> typer.Typer:
    """Return the commands as typer sees them; only those that `words` name have their options.

    To know its options a command's module is imported, which would take long for all of them.
    """
    import typer

    def group(text: str) -> typer.Typer:
        return typer.Typer(add_completion=False, rich_markup_mode=None, help=text)

    outer = typer.Typer(rich_markup_mode=None)  # completion is a matter of the whole
    inner = group("measure, print and compare")
    for name, (_, module, text) in SUBCOMMANDS.items():
        first, _, second = name.partition(" ")
        if second:
            named = list(words[:2]) == [first, second]
            inner.command(second, help=text)(_command(module if named else None))
        elif first in _NESTED:
            models = group(text)
            # options without a model are the group's own
            named = list(words[:1]) == [first] and words[1:2] not in [[w] for w in _NESTED[first]]
            models.callback(invoke_without_command=True)(_command(module if named else None))
            for word in _NESTED[first]:
                named = list(words[:2]) == [first, word]
                models.command(word)(_command(module if named else None, word))
            outer.add_typer(models, name=first)
        else:
            outer.command(first, help=text)(_command(module if [first] == words[:1] else None))
    outer.add_typer(inner, name="profile")
    return outer


def _command(module: str | None, model: str | None = None) -> Callable[..., None]:
    """Return a function with the options of a module's command, or a model's, as its parameters."""

    def call(**values: Any) -> None: ...

    parameters = []
    if module is not None:
        found = import_module(module)
        command: Command = found.COMMAND if model is None else found.MODELS[model].command
        parameters = [_parameter(row) for row in command.rows]
    # typer reads the signature; made of the rows, an option is said once
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _parameter(row: Row) -> inspect.Parameter:
    import typer

    info: Any
    if row.positional:
        info = typer.Argument(None, help=row.help)
    elif row.flaglike:
        text = f"--{row.name}/--no-{row.name}" if row.kind == "switch" else f"--{row.name}"
        info = typer.Option(False, text, help=row.help)
    else:
        info = typer.Option(None, f"--{row.name}", help=row.help, autocompletion=_words(row))
    hint = bool if row.flaglike else str | None
    return inspect.Parameter(row.key, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=hint)


def _words(row: Row) -> Callable[[str], list[str]] | None:
    """Return what completes a value of an option; None: the shell does, with files."""
    names = _NAMES.get(row.name)
    if names is None and not row.choices:
        return None

    def found(incomplete: str) -> list[str]:
        from autopar.documents.catalog import card_names, model_names, site_names, stack_names

        shipped = {
            "models": model_names,
            "cards": card_names,
            "stacks": stack_names,
            "sites": site_names,
        }
        known = list(row.choices) if names is None else shipped[names]()
        return [word for word in known if word.startswith(incomplete)]

    return found
