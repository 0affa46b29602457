"""Reader of launch scripts and of YAML, TOML and JSON configurations, and a writer of YAML.

The reader returns flags or nested keys. The packages of the engines define their meaning.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import field

from autopar.documents.json import load_object
from autopar.errors import DocumentError, shortened
from autopar.limits import (
    DEEPEST,
    MOST_ALIASED_VALUES,
    MOST_DIGITS,
    MOST_SCRIPT_BYTES,
    MOST_YAML_BYTES,
    is_long_integer,
    read_bytes,
    refuse_deep_values,
    refuse_dotted_keys,
    refuse_long_integers,
    too_many_digits,
)
from autopar.records import Record, replace
from search.engines.text.python import is_python
from search.engines.text.shell import STARTED, script_command
from search.engines.text.shell_values import (
    Budget,
    Command,
    Holes,
    path_of,
    program_of,
    slurm_variables,
    variables_of_scheduler,
    with_arguments,
)
from search.engines.text.shell_words import shadowed

# --------------------------------------------------------------------------------------------------
# YAML. PyYAML reads it, but does not write it: the engines' own files have lists on one line and
# mappings below their keys, which no single style of PyYAML produces.


_PLAIN = re.compile(r"[A-Za-z0-9_./$][A-Za-z0-9_./${}:@+\-]*")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_BRACE = re.compile(r"[{}]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def dump_yaml(document: Mapping[str, Any], indent: int = 0, *, quoted: bool = False) -> str:
    """Return a document of mappings, lists of scalars and scalars as YAML; ends in a newline.

    quoted : True to quote all strings; False to quote those that YAML reads as another type.
    """
    pad, lines = "  " * indent, []
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{key}:\n" + dump_yaml(value, indent + 1, quoted=quoted))
        elif isinstance(value, list | tuple):
            items = (_scalar(item, in_list=True, quoted=quoted) for item in value)
            lines.append(f"{pad}{key}: [{', '.join(items)}]\n")
        else:
            lines.append(f"{pad}{key}: {_scalar(value, quoted=quoted)}\n")
    return "".join(lines)


def _scalar(value: Any, *, in_list: bool = False, quoted: bool) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # YAML 1.1 reads 3e-05, without a decimal point, as a string.
        mantissa, mark, exponent = repr(value).partition("e")
        return mantissa + (".0" if mark and "." not in mantissa else "") + mark + exponent
    text = str(value)
    # Inside a list, a brace would start a mapping.
    plain = not quoted and _is_plain(text) and not (in_list and _BRACE.search(text))
    return text if plain else json.dumps(text)


def _is_plain(text: str) -> bool:
    """Return True if an unquoted string is the same string in YAML 1.1 and 1.2.

    1e5 is a string in YAML 1.1 and a number in 1.2; `no` is a boolean in 1.1 and a string in 1.2.
    """
    import yaml

    if not _PLAIN.fullmatch(text) or text.endswith(":") or _NUMBER.fullmatch(text):
        return False
    tag = yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False))
    return bool(tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG)


def load_yaml(text: str, path: object, notes: list[str] | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML text; anchors, aliases and merged keys are resolved.

    path : name of the file, for errors.
    notes : list that receives a sentence for each repeated key with different values; the last
        value counts. None: such a key is an error.

    Raises DocumentError, with the line, if the text is not YAML, is not a mapping or has tags.
    """
    import yaml  # imported only for a YAML file

    try:
        depth, begun = 0, False
        for token in yaml.scan(text):
            if isinstance(token, yaml.DocumentStartToken) and begun:
                raise _no_launch(path, f"line {token.start_mark.line + 1} starts another document")
            begun |= token.id not in _BEFORE
            if isinstance(token, yaml.TagToken):
                handle, name = token.value
                if handle == "!":  # of an application, such as CloudFormation
                    where = f"line {token.start_mark.line + 1}"
                    raise _no_launch(path, f"{where} has the tag {shortened(f'!{name}')}")
                problem = "has a YAML tag ('!'), which is not supported"
                raise _fail(path, token.start_mark.line, problem, "Remove the tag, or use JSON")
            depth += token.id in _OPENING
            depth -= token.id in _CLOSING
            if depth > DEEPEST:
                line = token.start_mark.line
                raise _fail(path, line, f"nests deeper than {DEEPEST} levels")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise DocumentError(str(path), "is empty, expected keys and values")
        if isinstance(root, yaml.SequenceNode):
            raise _no_launch(path, "it is a list, and no keys and values")
        if isinstance(root, yaml.ScalarNode):
            line = root.start_mark.line
            raise _fail(path, line, f"is not `key: value`: {root.value[:40]!r}")
        built: dict[str, Any] = _Built(path, notes).of(root)
        return built
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        raise _fail(path, line, f"has the character {chr(error.character)!r}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if _TEMPLATE.search(text) is not None:
            raise _no_launch(path, "it is a template with {{ }}") from None
        problem = " ".join(str(error.problem or error.context).split())
        raise _fail(path, mark.line, f"is not YAML: {problem}") from None
    except RecursionError:
        # An alias can also contain itself.
        raise DocumentError(str(path), "is nested too deeply", remedy="Use a JSON file") from None


_TEMPLATE = re.compile(r"\{\{.*\}\}")
_BEFORE = ("<stream start>", "<directive>", "<document start>")
"""Names of PyYAML's tokens in front of the content of the first document."""
_OPENING = ("[", "{", "<block sequence start>", "<block mapping start>")
_CLOSING = ("]", "}", "<block end>")
"""Names of PyYAML's tokens that start and end a level."""


class _Built:
    """Conversion of PyYAML nodes to values; all keys become strings."""

    def __init__(self, path: object, notes: list[str] | None) -> None:
        self._path, self._notes, self._left = path, notes, MOST_ALIASED_VALUES

    def of(self, node: Any) -> Any:
        import yaml

        self._count()
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            # In launch files, a date or `=` is a string.
            if node.tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"):
                return node.value
            try:
                # The length comes first: the time of base 60 is quadratic in it.
                is_long = node.tag in _NUMBERS and len(node.value) > MOST_DIGITS
                value = None if is_long else yaml.SafeLoader("").construct_object(node)
            except (ValueError, OverflowError):  # such as 0x_
                return node.value
            if is_long or is_long_integer(value):
                problem = f"has a number of more than {MOST_DIGITS:,} digits"
                raise _fail(self._path, node.start_mark.line, problem)
            return value
        return self._mapping(node)

    def _count(self) -> None:
        """Count a value; raises DocumentError for too many.

        Aliases of aliases, and merged keys, double the values with every line.
        """
        self._left -= 1
        if self._left < 0:
            raise DocumentError(
                str(self._path), f"has more than {MOST_ALIASED_VALUES} values, aliases resolved"
            )

    def _mapping(self, node: Any) -> dict[str, Any]:
        import yaml

        self._count()
        own, merged = dict[str, Any](), dict[str, Any]()
        for key, value in node.value:
            line = key.start_mark.line
            if not isinstance(key, yaml.ScalarNode):
                raise _fail(self._path, line, "has a key that is not text")
            if key.tag == "tag:yaml.org,2002:merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                if not all(isinstance(source, yaml.MappingNode) for source in sources):
                    raise _fail(self._path, line, "merges a value that is not a mapping")
                for source in reversed(sources):  # of merged mappings, the first takes precedence
                    found = self._mapping(source)
                    self._say_merged(line, found, merged)
                    merged |= found
                continue
            found = self.of(value)
            if key.value in own and own[key.value] != found:
                if self._notes is None:
                    raise _fail(self._path, line, f"repeats the key {key.value!r}")
                self._notes.append(
                    f"line {line + 1} repeats {key.value}: {found!r} counts, not {own[key.value]!r}"
                )
            own[key.value] = found
        # Keys of the mapping override merged ones.
        return merged | own

    def _say_merged(self, line: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        """Append a note for each key with different values in two merged mappings."""
        for key, value in first.items():
            if self._notes is not None and other.get(key, value) != value:
                # In PyYAML 6.0.4 the last one counts, against the YAML specification and 6.0.3.
                self._notes.append(
                    f"line {line + 1} merges two values of {key}: the first, "
                    f"{value!r}, counts; PyYAML 6.0.4 uses {other[key]!r}"
                )


def _no_launch(path: object, why: str) -> DocumentError:
    """Return the error for YAML that is no mapping of an engine, such as that of Kubernetes."""
    return DocumentError(str(path), f"is not a launch file of an engine that autopar knows: {why}")


def _fail(
    path: object, line: int, problem: str, remedy: str = "Simplify the YAML, or use JSON"
) -> DocumentError:
    return DocumentError(str(path), f"line {line + 1} {problem}", remedy=remedy)


# --------------------------------------------------------------------------------------------------
# A configuration in any of the formats.


class Configuration(Record):
    """Content of a launch file: the flags of a script, or the keys of a document."""

    path: Path
    flags: Mapping[str, tuple[str, ...]] | None
    """Values of a script by flag name, without leading hyphens and with `-` for `_`.

    None if the file is a document.
    """
    command: Command | None = None
    """Launcher, program and arguments of a script as written; None for a document."""
    document: Mapping[str, Any]
    """Keys and values of a document; empty for a script."""
    python: str | None = None
    """Text of a Python program; None for other files."""
    world_size: int | None = None
    """Number of processes that the script starts; None if not given."""
    num_nodes: int | None = None
    """Number of nodes of the launch; None if not given."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a script exports to its launch command."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on assumptions about the file."""

    @property
    def written(self) -> Mapping[str, str | None]:
        """Text of each file that the script writes for its launch, as in `Command.written`."""
        return {} if self.command is None else self.command.written

    def num_gpus(self, known: int | None) -> int:
        """Return the number of GPUs: `known`, else `world_size` of the file.

        Raises DocumentError if neither is given.
        """
        found = known or self.world_size
        if not found:
            raise DocumentError(
                self.path,
                "contains no number of GPUs",
                remedy="Add --nodes and --gpus-per-node",
            )
        return found


def read_configuration(
    path: Path | str,
    *,
    world_size: int | None = None,
    harmless: Callable[[str], bool] | None = None,
    text: str | None = None,
) -> Configuration:
    """Return the content of a `.json`, `.yaml` or `.toml` file, or of a launch script.

    The suffix selects the format; JSON is also recognised by its content.

    world_size : expected number of processes. An environment variable of the script that sets the
        number of nodes or processes receives the matching value.
    harmless : returns True for a flag name that affects neither memory nor time. Conditions known
        only at run time are accepted if they decide only such flags.
    text : text of the file; None to read it.

    Raises DocumentError if the file is missing or unreadable, or has none of these formats.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        return Configuration(path=path, flags=None, document=load_object(path, text=text).data)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if text is None:
        text = _read(path, MOST_YAML_BYTES if is_yaml else MOST_SCRIPT_BYTES)
    if is_yaml:
        notes = list[str]()
        document = load_yaml(text, path, notes)
        return Configuration(path=path, flags=None, document=document, notes=tuple(notes))
    if path.suffix.lower() == ".toml":
        return Configuration(path=path, flags=None, document=_toml(text, path))
    if path.suffix.lower() == ".py" and is_python(text):
        run = STARTED.get()
        if run.arguments:
            remedy = "Omit --args, and change the defaults in the file"
            raise DocumentError(path, "is a Python file, read without arguments", remedy=remedy)
        given = run.environment
        return Configuration(path=path, flags=None, document={}, python=text, environment=given)
    # JSON without a `.json` suffix.
    if text.lstrip().startswith("{"):
        return Configuration(path=path, flags=None, document=load_object(path, text=text).data)
    try:
        command, size = _sized(text, path, world_size, harmless)
    except DocumentError:
        refuse_other(path)
        raise
    if not command.program and not any(word.startswith("--") for word in command.arguments):
        if command.needs_arguments and _LAUNCHES.search(text.replace("\\\n", " ")):
            raise DocumentError(
                path,
                "starts nothing without its arguments",
                remedy=with_arguments(command.needs_arguments),
            )
        refuse_other(path)
        if command.ended:
            raise DocumentError(
                path,
                f"contains no launch command up to line {command.ended}, where it ends "
                "with an error",
                remedy="Set its variables there, or give --args or --env",
            )
        raise DocumentError(
            path,
            "contains no launch command, such as `torchrun pretrain_gpt.py --num-layers 32`",
            remedy="Use the launch script, or a .yaml, .toml or .json configuration",
        )
    return Configuration(
        path=path,
        flags=flags_of(
            [word for at, word in enumerate(command.arguments) if at not in command.loose]
        ),
        command=command,
        document={},
        world_size=size,
        num_nodes=_nodes(command.before, variables_of_scheduler(text)),
        environment=command.environment,
        notes=command.notes,
    )


_LAUNCHES = re.compile(
    r"\.py\b|(\btorchrun|\baccelerate launch|\bdeepspeed|\btorch\.distributed\.\w+)\s"
    r"[^\n;&|]*(\$\{?[1-9@*]|\s-m\s)"
)
"""Pattern of programs in a script, and of launchers that take an argument of it or a module."""


_OTHERS = {
    ".md": "a Markdown document",
    ".markdown": "a Markdown document",
    ".rst": "a reStructuredText document",
    ".html": "a web page",
    ".py": "a Python program",
    ".csv": "a table",
    ".log": "a log",
}
"""Files that are no launch files, by suffix; scripts with these suffixes are read all the same."""


def refuse_other(path: Path) -> None:
    """Raise DocumentError for a file that the shell cannot run, if its suffix tells what it is."""
    kind = _OTHERS.get(path.suffix.lower())
    if kind is not None:
        raise DocumentError(
            path,
            f"is {kind}, not a launch script",
            remedy="Give the script that starts training, or copy its command into one",
        ) from None


def _sized(
    text: str, path: Path, world_size: int | None, harmless: Callable[[str], bool] | None
) -> tuple[Command, int | None]:
    """Return (launch command of a script, its number of processes or None).

    The command is adapted to start `world_size` processes if possible.

    Environment variables such as `SLURM_NNODES`, `NNODES` or `WORLD_SIZE` may set the number of
    processes. Their defaults in the script and its `#SBATCH` requests may be overridden. To find
    the variable, each candidate in turn gets twice its value. If the number of processes changes,
    the variable is set so that `world_size` processes start.
    """
    started, budget = STARTED.get(), Budget(str(path))
    asked = variables_of_scheduler(text)

    def read(given: Mapping[str, str]) -> tuple[Command, int | None]:
        environment = {**asked, **given, **started.environment}
        command = script_command(
            text,
            path,
            given=environment,
            arguments=started.arguments,
            harmless=harmless,
            budget=budget,
        )
        command = _submitted(command, path)
        return command, _world(command, environment)

    def size_with(given: Mapping[str, str]) -> int | None:
        with suppress(DocumentError):
            return read(given)[1]
        return None

    command, own = read({})
    if own == world_size:
        return command, own
    held = {**asked, **command.unset}
    counts = [
        (name, default)
        for name, default in held.items()
        if _COUNT.fullmatch(default) and name not in started.environment
    ][:_MOST_VARIABLES]
    # One reading with all values doubled shows that most scripts have no such variable.
    twice = {name: str(2 * int(default or 1)) for name, default in counts}
    if not counts or size_with(twice) == own:
        return command, own
    notes = list[str]()
    for name, default in counts:
        probe = 2 * int(default or 1)
        size = size_with({name: str(probe)})
        if size is None or size == own:
            continue
        if world_size is None:
            if default and name not in asked:
                notes.append(f"{name} not set; using its default {default}: {own} processes")
        elif probe * world_size % size == 0:
            with suppress(DocumentError):
                meant, found = read({name: str(probe * world_size // size)})
                if found == world_size:
                    return meant, found
    return replace(command, notes=(*command.notes, *notes)), own


def _submitted(command: Command, path: Path) -> Command:
    """Return the launch command that a submitter starts: what follows `--`, after its last `&&`.

    Its `--env NAME=VALUE` are environment variables. Raises DocumentError if it starts the command
    on several nodes, because only the submitter knows how many processes these have.
    """
    words = command.arguments
    if "--" not in words:
        return command
    own, at = words[: words.index("--")], words.index("--") + 1
    starts = [at, *(place + 1 for place in range(at, len(words)) if words[place] == "&&")]
    ends = [*(place - 1 for place in starts[1:]), len(words)]
    for start, end in reversed([*zip(starts, ends, strict=True)]):
        launch = program_of([*words[start:end]], Holes(str(path)))
        if launch is None:
            continue
        before, program, arguments = launch
        for flag, given in flags_of(own).items():
            if flag in _NODES and given != ("1",) and not _NODES & flags_of(before).keys():
                raise DocumentError(
                    path,
                    f"{Path(command.program).name} starts the command after `--` with "
                    f"--{flag.replace('-', '_')} {' '.join(given)}",
                    remedy="Write that command into a script, with its number of processes",
                )
        first = end - len(arguments)
        sets = (v.split("=", 1) for w, v in pairwise(own) if w == "--env" and "=" in v)
        return replace(
            command,
            before=tuple(before),
            program=program,
            arguments=tuple(arguments),
            loose=tuple(place - first for place in command.loose if first <= place < end),
            environment={**command.environment, **dict(sets)},
            notes=(*command.notes, f"the command that {Path(command.program).name} starts"),
        )
    return command


_NODES = frozenset({"num-nodes", "nodes", "nnodes", "num-machines", "replicas"})
"""Arguments of submitters with a number of machines."""
_COUNT = re.compile("|[1-9][0-9]{0,5}")
"""Pattern of an empty default or a positive number."""
_MOST_VARIABLES = 32
"""Maximum number of environment variables to try."""


def _toml(text: str, path: Path) -> dict[str, Any]:
    import tomllib  # imported only for a TOML file

    refuse_dotted_keys(path, text)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DocumentError(path, f"is not TOML: {error}") from None
    except ValueError:
        raise too_many_digits(path, text) from None
    except RecursionError:
        raise DocumentError(path, "is nested too deeply") from None
    refuse_deep_values(path, document)
    refuse_long_integers(path, document)
    return document


def named_path(name: str, beside: Path | None) -> Path | None:
    """Return the path of a file or folder that a launch file names; None if there is none.

    The folder `beside` of the launch file is tried first, then the working folder, where shells and
    launchers look. None: only the working folder. A name may begin with either folder as scripts
    spell it, such as `$(dirname "$0")` or `$PWD`.
    """
    name = _HERE.sub("", name)
    folders = (Path(),) if beside is None else (beside, Path())
    found = (folder / name for folder in folders)
    # `Path.exists` raises OSError for a name that is too long.
    return next((path for path in found if os.path.exists(path)), None)  # noqa: PTH110


_OWN = r'\$\(dirname (-- )?"?\$(0|\{?BASH_SOURCE(\[0\])?\}?)"?\)'
_HERE = re.compile(
    rf"(`pwd`|\$\(pwd\)|\$\{{?PWD\}}?|{_OWN}"
    rf'|\$\(cd (-- )?"?{_OWN}"?( *&?>+ *[\w/]+)* *&& *pwd( -P)?\))/+(?=.)'
)
"""Folder of a script, or the working folder, at the beginning of a path."""


def named_file(name: str, beside: Path | None, notes: list[str] | None = None) -> Path:
    """Return the path of a configuration that a launch file names; raises DocumentError.

    beside : folder of the launch file, as in `named_path`.
    notes : list that receives a sentence if the working folder contains another file of the name.
    """
    found = named_path(name, beside)
    if found is None:
        where = "" if beside is None else "neither in the folder of the launch file nor "
        raise DocumentError(name, f"this file is {where or 'not '}in the working folder")
    note = shadowed(found, Path(name))
    if notes is not None and note:
        notes.append(note)
    return found


def named_text(
    name: str,
    beside: Path | None,
    written: Mapping[str, str | None],
    notes: list[str] | None = None,
) -> tuple[Path, str | None]:
    """Return (path, text) of a configuration that a launch names; raises DocumentError.

    The text is None unless the launch script writes the file itself; then it is what the script
    writes, whatever an earlier run left on the disk.

    written : `Configuration.written`. Other parameters as in `named_file`.
    """
    if (path := path_of(name)) not in written:
        return named_file(name, beside, notes), None
    text = written[path]
    if text is None:
        raise DocumentError(
            name,
            "is written by the launch script, with a text known only at run time",
            remedy="Run those lines of the script, and name the written file in a copy without "
            "them",
        )
    return Path(name), text


def _read(path: Path, most: int) -> str:
    how = "Give a launch script, or a configuration file of an engine"
    try:
        raw = read_bytes(path, most, "a launch script or configuration", remedy=how)
        return raw.decode("utf-8-sig")  # carriage returns matter to bash
    except UnicodeDecodeError as error:
        raise DocumentError(path, f"byte {error.start} is not UTF-8") from None


def flags_of(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of a command line by flag name; of a repeated flag, the last one counts.

    Names have no leading hyphens and `-` for `_`. A flag without values has an empty tuple.
    """
    flags: dict[str, tuple[str, ...]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or len(word) == 2:
            continue
        name, equals, value = word[2:].partition("=")
        # Programs with argparse spell a flag with `-` or `_`.
        name = name.replace("_", "-")
        given = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            given.append(words[at])
            at += 1
        flags[name] = tuple(given)
    return flags


def arguments_in(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments in a document: its `MODEL_ARGS` or `args`, else the document itself."""
    for key in _ARGUMENTS:
        if isinstance(document.get(key), Mapping):
            found: Mapping[str, Any] = document[key]
            return found
    return document


def flags_of_document(
    document: Mapping[str, Any], *, several: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the values of a document of arguments by flag name, as `flags_of` does.

    Keys with the value `false` or `null` are omitted; `true` becomes an empty tuple.
    several : flags with several values, whose string is split at blanks.
    """
    words: dict[str, tuple[str, ...]] = {}
    for key, value in document.items():
        flag = str(key).lstrip("-").replace("_", "-")
        if value is None or value is False or isinstance(value, Mapping):
            continue
        if value is True:
            words[flag] = ()
        elif isinstance(value, list | tuple):
            words[flag] = tuple(str(item) for item in value)
        elif isinstance(value, float) and value.is_integer():
            # Whole numbers may be floats in YAML, such as 5.0.
            words[flag] = (str(int(value)),)
        else:
            text = str(value)
            # Quotes within a value are for the shell that the launcher of the document starts.
            quoted = _QUOTED.fullmatch(text)
            text = text if quoted is None else quoted[2]
            words[flag] = tuple(text.split()) if flag in several else (text,)
    return words


_QUOTED = re.compile(r"(['\"])([^'\"]*)\1")


_ARGUMENTS = ("MODEL_ARGS", "model_args", "args")
"""Keys of documents under which arguments are nested."""


def _world(command: Command, environment: Mapping[str, str]) -> int | None:
    """Return the number of processes of a launch command; None if unknown.

    torchrun starts nodes times processes per node, `deepspeed` nodes times GPUs, accelerate those
    of `--num_processes`; without them, srun and mpirun start tasks of their options or the job.

    environment : variables of the job, as Slurm sets them.
    """
    before, own = command.before, command.environment
    names = [word.rpartition("/")[2] for word in before]
    if "srun" in names and not _RANKS_WITHIN.intersection(names):
        words = before[names.index("srun") + 1 :]
        tasks = ({**environment, **slurm_variables(words)}).get("SLURM_NTASKS", "")
        return int(tasks) if re.fullmatch("[0-9]{1,9}", tasks) else None
    if "mpirun" in names and not _RANKS_WITHIN.intersection(names):
        words = before[names.index("mpirun") + 1 :]
        found = [v for w, v in pairwise(words) if w in ("-n", "-np", "--np", "-c")]
        return int(found[0]) if found and re.fullmatch("[0-9]{1,9}", found[0]) else None
    flags = flags_of(before)
    if "deepspeed" in names:
        chosen = [v for w, v in pairwise(before) if w == "-i"] or flags.get("include", ())
        if chosen:
            return _included(chosen[0])
        # `--exclude` and `--hostfile` leave GPUs of hosts that only the machine knows.
        counts = [flags.get("num-nodes", ("1",))[:1], flags.get("num-gpus", ())[:1]]
    elif command.program in ("llamafactory-cli", "lmf", "swift"):
        each = "1" if command.program == "swift" else ""
        counts = [(own.get("NNODES", "1"),), (own.get("NPROC_PER_NODE", each),)]
    elif command.program == "automodel":
        counts = [flags_of(command.arguments).get("nproc-per-node", ())[:1]]
    elif "accelerate" in names:
        counts = [flags.get("num-processes", ())[:1]]
    else:
        counts = [flags.get("nnodes", ("1",))[:1], flags.get("nproc-per-node", ())[:1]]
    # A variable, or a range such as 1:4, is not a number.
    if not all(words and re.fullmatch("[0-9]{1,9}", words[0]) for words in counts):
        return None
    return math.prod(int(words[0]) for words in counts)


def _nodes(before: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Return the number of nodes of a launch command; None if unknown. Parameters as `_world`.

    torchrun without `--nnodes` starts one node; the other launchers may have a file of hosts.
    """
    flags, names = flags_of(before), [word.rpartition("/")[2] for word in before]
    given = [flags[name][0] for name in ("nnodes", "num-nodes", "num-machines") if flags.get(name)]
    if "nnodes" not in flags and _TORCHRUN.intersection(names):
        given = ["1"]
    if "srun" in names and not _RANKS_WITHIN.intersection(names):
        words = before[names.index("srun") + 1 :]
        given = [({**environment, **slurm_variables(words)}).get("SLURM_NNODES", "")]
    return int(given[0]) if given and re.fullmatch("[1-9][0-9]{0,5}", given[0]) else None


def _included(text: str) -> int | None:
    """Return the number of GPUs of `deepspeed --include`, such as 4 for `a:0,1@b:0,1`.

    None: a host without numbers has all its GPUs.
    """
    hosts = [re.fullmatch(r"[^:@]+:([0-9]+(?:,[0-9]+)*)", host) for host in text.split("@")]
    return sum(host[1].count(",") + 1 for host in hosts if host) if all(hosts) else None


_TORCHRUN = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_RANKS_WITHIN = _TORCHRUN | {"accelerate", "deepspeed"}
"""Launchers that start several processes in each task of srun."""
