"""Suggested changes of a launch file as a unified diff.

Settings are replaced, added and removed as text, in the spelling of the file. A patch is returned
only if the changed file, parsed again, describes the suggested run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path

from autopar.errors import AutoparError
from autopar.records import replace
from autopar.run.run import Run
from search.engines.changes import Changes
from search.engines.megatron.check import same_run
from search.engines.reader import CheckedFile

_LEAVES = {".json": '"{key}": {value}, ', ".toml": "{key} = {value}", ".yaml": "{key}: {value}"}
"""Line of a new setting by suffix of the file; scripts add a flag."""
_NEXT_TO = ("pipeline-model-parallel-size", "tensor-model-parallel-size", "micro-batch-size")
"""Flags that a new one is placed next to, in this order."""


def patch_of(
    file: CheckedFile, changes: Changes, wanted: Run, read: Callable[..., CheckedFile]
) -> str | None:
    """Return a unified diff after which a file describes the run `wanted`; None if not possible.

    read : function (path, text=text of the file) -> parsed file
    """
    path = Path(file.path)
    try:
        before = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    after = _changed(before, path.suffix.lower(), file, changes)
    if after is None or not _describes(file.path, after, wanted, read):
        return None
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), file.path, file.path
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _describes(path: str, text: str, wanted: Run, read: Callable[..., CheckedFile]) -> bool:
    """Return True if a file with this text describes the run `wanted`, next to its own files."""
    try:
        found = read(path, text=text).run
    except AutoparError:
        return False
    # The name is the path of the file.
    return found is not None and same_run(replace(found, name=wanted.name), wanted)


def _changed(text: str, suffix: str, file: CheckedFile, changes: Changes) -> str | None:
    """Return the text with these changes; None if a setting was not found exactly once."""
    suffix = ".yaml" if suffix == ".yml" else suffix
    found: str | None = text
    for key, before, after in changes:
        if found is None:
            break
        if before is None:
            assert after is not None, "a change has a value before or after"
            found = _added(found, suffix, file, key, after)
        else:
            found = _replaced(found, key, before, after, is_yaml=suffix == ".yaml")
    return found


def _replaced(text: str, key: str, before: str, after: str | None, *, is_yaml: bool) -> str | None:
    """Return the text with a setting replaced, or removed for `after` None.

    None if the setting does not occur exactly once, with its value or with a variable of it.
    """
    if is_yaml and not before:
        before = "true"  # of a switch
    found = list(_setting(key, before).finditer(text))
    if not found and before and after is not None:
        return _in_variable(text, key, before, after)
    if len(found) != 1:
        return None
    one = found[0]
    if after is None:
        return _without_line(text, one) if is_yaml else _without(text, one)
    if not before:  # a flag without a value
        return None
    return text[: one.start("value")] + after + text[one.end("value") :]


def _in_variable(text: str, key: str, before: str, after: str) -> str | None:
    """Return a script in which the variable of a flag, or its default, has another value.

    None if the flag does not occur exactly once, or its variable is not assigned exactly once.
    """
    flag = re.escape(f"--{key.lstrip('-')}").replace(r"\-", "[-_]")
    names = re.findall(rf"""(?<![\w-]){flag}[= \t]+["']?\$\{{?([A-Za-z_]\w*)\b""", text)
    if len(names) != 1:
        return None
    value = rf"""["']?(?:\$\{{{names[0]}:?-)?(?P<value>{re.escape(before)})\b"""
    found = list(re.finditer(rf"(?<![\w$]){names[0]}={value}", text))
    if len(found) != 1:
        return None
    return text[: found[0].start("value")] + after + text[found[0].end("value") :]


def _without(text: str, one: re.Match[str]) -> str | None:
    """Return the text without a flag of a script; None in other files."""
    if not one["name"].startswith("--") or one["quote"]:
        return None
    left, right = text[: one.start()].rstrip(" "), text[one.end() :]
    rest = right.split("\n", 1)
    if left.endswith("\n") and rest[0].strip() in ("", "\\"):
        return left + (rest[1] if len(rest) > 1 else "")
    return (
        left + ("" if left.endswith("\n") or right[:1] in ("\n", "") else " ") + right.lstrip(" ")
    )


def _without_line(text: str, one: re.Match[str]) -> str | None:
    """Return a YAML text without the line of a setting; None if the line has more."""
    start, end = text.rfind("\n", 0, one.start()) + 1, text.find("\n", one.end())
    end = len(text) if end < 0 else end
    alone = not text[start : one.start()].strip() and not text[one.end() : end].strip()
    return text[:start] + text[end + 1 :] if alone else None


def _setting(key: str, value: str | None = None) -> re.Pattern[str]:
    """Return a pattern of a setting in a script, TOML, YAML or JSON; None matches any value."""
    name = rf"{_name_in(key)}|{_name_in(key.rpartition('.')[2])}"
    if value == "":
        words = r"(?P<value>)"
    elif value is None:
        words = r"""[ \t]*[:= \t][ \t]*["']?(?P<value>[\w.,-]+)["']?"""
    else:
        spaced = r"[ \t]+".join(re.escape(word) for word in value.split())
        words = rf"""[ \t]*[:= \t][ \t]*["']?(?P<value>{spaced})["']?"""
    return re.compile(
        rf"""(?<![\w.-])(?P<quote>["']?)(?P<name>(?:--)?(?:{name}))(?P=quote){words}(?![\w.-])"""
    )


def _name_in(key: str) -> str:
    """Return a pattern of the name of a setting, with `-` or `_` between its words."""
    name = re.escape(key.lstrip("-")).replace(r"\-", "-")
    return name.replace("-", "[-_]").replace("_", "[-_]").replace("[-[-_]]", "[-_]")


def _added(text: str, suffix: str, file: CheckedFile, key: str, value: str) -> str | None:
    """Return the text with an additional setting; None if no position was found for it."""
    flag = file.spelled(key, value)
    if flag.startswith("--") and suffix not in _LEAVES:
        return _with_flag(text, file, flag)
    section, _, name = key.rpartition(".")
    if suffix == ".yaml" and flag.startswith("--"):
        # files of fine-tuning programs have their arguments as keys
        name = name.lstrip("-").replace("-", "_")
    plain = value.lstrip("-").isdigit() or value in ("true", "false")
    quoted = value if plain or suffix == ".yaml" else f'"{value}"'
    if suffix == ".json":
        leaf = f'"{f"--{name}" if flag.startswith("--") else name}": {quoted if value else "true"}'
        return _in_json(text, section, leaf)
    if suffix in _LEAVES:
        leaf = _LEAVES[suffix].format(key=name, value=quoted)
        heading = rf"\[{re.escape(section)}\]" if suffix == ".toml" else rf"{re.escape(section)}:"
        return _under(text, heading if section else "", leaf, indented=suffix == ".yaml")
    return None


def _with_flag(text: str, file: CheckedFile, flag: str) -> str | None:
    """Return a script with an additional flag, after a flag of the command that occurs once.

    None if no flag occurs exactly once.
    """
    first = [key for key in _NEXT_TO if key in file.words]
    for key in dict.fromkeys((*first, *file.words)):
        words = file.words[key]
        found = list(_setting(key, " ".join(words)).finditer(text)) if words else []
        if len(found) == 1 and found[0]["name"].startswith("--") and not found[0]["quote"]:
            end = found[0].end()
            return f"{text[:end]} {flag}{text[end:]}"
    return None


def _in_json(text: str, section: str, leaf: str) -> str | None:
    """Return a JSON text with an additional member of a section, or of the top level if empty.

    None if the section does not occur exactly once.
    """
    name = section.rpartition(".")[2]
    opening = rf'"{re.escape(name)}"\s*:\s*\{{' if section else r"\A\s*\{"
    found = list(re.finditer(opening, text))
    if len(found) != 1:
        return None
    end = found[0].end()
    space = re.match(r"\s*", text[end:])
    between = space[0] if space is not None else ""
    empty = text[end + len(between) : end + len(between) + 1] == "}"
    return (
        f"{text[:end]}{between}{leaf}{'' if empty else ','}{'' if empty else between or ' '}"
        + (text[end + len(between) :])
    )


def _under(text: str, heading: str, leaf: str, *, indented: bool) -> str | None:
    """Return a text with an additional line below a heading, or at the end for an empty heading.

    None if the heading does not occur exactly once.
    """
    if not heading:
        return text + ("" if text.endswith("\n") or not text else "\n") + f"{leaf}\n"
    found = list(re.finditer(rf"^{heading}[ \t]*\n([ \t]*)", text, re.MULTILINE))
    if len(found) != 1:
        return None
    one = found[0]
    indent = one[1] if indented else ""
    return f"{text[: one.start(1)]}{indent}{leaf}\n{text[one.start(1) :]}"
