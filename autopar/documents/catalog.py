"""Search for models and hardware by path or shipped name, and for files in default folders.

An existing path has priority over a shipped name. A wheel contains the shipped folders `models/`
and `hardware_configs/` in `autopar/_data/`; in an editable installation they are next to the
package.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from autopar.errors import DocumentError, InputError, did_you_mean, nearest_words
from autopar.records import Record
from autopar.run.model import ModelSpec

# --------------------------------------------------------------------------------------------------
# Choice of the model file in a directory: documented name first, then names of other releases.


Content = Literal["processed", "raw", "none"]
"""Usable content of a profile file: processed keys, raw runs that suffice to derive them, or
neither."""

_OTHER_UNITS = ("_attention", "_mlp", "_first", "_last")
"""Name endings of files that contain only a part of a model or of a measurement."""


class _Tier(Record):
    """File names of equal priority."""

    paths: tuple[Path, ...]
    note: str | None = None


def model_file_name(kind: Literal["computation", "memory"], precision: str, spec: ModelSpec) -> str:
    """Return the documented name of a model's profile file, with `*` if its heads are unknown."""
    heads = spec.layers[0].num_heads
    hidden = spec.layers[0].hidden_size
    return f"{kind}_profiling_{precision}_hidden_{hidden}_head_{heads or '*'}.json"


def locate(
    directory: Path,
    kind: Literal["computation", "memory"],
    precision: str,
    spec: ModelSpec,
    content: Callable[[Path], Content],
    remedy: str,
) -> tuple[Path, tuple[str, ...]]:
    """Return the profile file of a model in a directory, and notes on skipped files.

    Names are tried in this order: the documented name, Galvatron's newest names (ending in `_all`)
    and those of v2.4 that contain the model's name, then other names that do not contradict the
    model. Files with processed keys have priority over files with sufficient raw entries.

    content : function that returns the usable content of a file.

    Raises DocumentError: no file is usable (with `remedy`), or several have equal priority.
    """
    tiers = _tiers(directory, kind, precision, spec)
    found = {path: content(path) for tier in tiers[:1] for path in tier.paths}
    skipped = []
    for wanted in ("processed", "raw"):
        for tier in tiers:
            for path in tier.paths:
                if path not in found:
                    found[path] = content(path)
            chosen = [path for path in tier.paths if found[path] == wanted]
            if len(chosen) > 1:
                raise DocumentError(
                    directory,
                    f"{len(chosen)} files could be the {kind} profile of model {spec.name!r}: "
                    + ", ".join(path.name for path in chosen),
                    remedy="Give the file instead of the directory",
                )
            if chosen:
                skipped = [
                    f"{path.name} was skipped: it has no processed keys"
                    for path, what in found.items()
                    if what != "processed" and path != chosen[0]
                ]
                return chosen[0], (*skipped, *([tier.note] if tier.note else []))
    expected = model_file_name(kind, precision, spec)
    present = [p.name for p in _documents(directory, f"{kind}_profiling_*.json")]
    unusable = [path.name for path, what in found.items() if what == "none"]
    problem = f"no {kind} profile of model {spec.name!r} in this directory, expected {expected}"
    if unusable:
        problem += f" ({', '.join(unusable)} has no processed keys)"
    elif present:
        problem += f" (present: {', '.join(present)})"
    raise DocumentError(directory, problem, remedy=remedy)


def _documents(directory: Path, pattern: str) -> tuple[Path, ...]:
    """Return the files that match a glob pattern, sorted by name, without sidecars."""
    found = sorted(directory.glob(pattern))
    return tuple(path for path in found if not path.name.endswith(".meta.json"))


def _tiers(
    directory: Path, kind: Literal["computation", "memory"], precision: str, spec: ModelSpec
) -> list[_Tier]:
    layer = spec.layers[0]
    documented = _documents(directory, model_file_name(kind, precision, spec))
    prefix = f"{kind}_profiling_{precision}_"
    names = [spec.name]
    if layer.num_heads is not None:
        names.append(f"hidden{layer.hidden_size}_head{layer.num_heads}")
    names += [f"{name}_seqlen{layer.seq_length}" for name in names]
    newest: list[Path] = []
    older: list[Path] = []
    other_newest: list[Path] = []
    other_older: list[Path] = []
    for path in _documents(directory, f"{prefix}*.json"):
        stem = path.name.removeprefix(prefix).removesuffix(".json")
        if path in documented:
            continue
        base = stem.removesuffix("_all")
        if base in names:
            (newest if base != stem else older).append(path)
        elif _may_be(base, spec):
            (other_newest if base != stem else other_older).append(path)
    note = f"the file was taken though its name does not name model {spec.name!r}"
    return [
        _Tier(paths=documented),
        _Tier(paths=tuple(newest)),
        _Tier(paths=tuple(older)),
        _Tier(paths=tuple(other_newest), note=note),
        _Tier(paths=tuple(other_older), note=note),
    ]


def _may_be(base: str, spec: ModelSpec) -> bool:
    """Return True if a file name without the model's name does not contradict the model."""
    if base.endswith(_OTHER_UNITS):
        return False
    layer = spec.layers[0]
    for pattern, actual in (
        (r"hidden_?([0-9]+)", layer.hidden_size),
        (r"head_?([0-9]+)", layer.num_heads),
        (r"seqlen_?([0-9]+)", layer.seq_length),
    ):
        match = re.search(pattern, base)
        if match and actual is not None and int(match[1]) != actual:
            return False
    return True


# --------------------------------------------------------------------------------------------------
# Default folders that profilers write to and a search reads from.


ALLREDUCE_FILES = "allreduce_bandwidth_*.json"
"""Pattern of the all-reduce files, which every set of hardware files contains."""
HARDWARE_FOLDER = Path("hardware")
"""Default folder of hardware files."""
SITE_FOLDER = Path("sites")
"""Default folder of site files."""
_HARDWARE_FOLDERS = (HARDWARE_FOLDER, Path("profile_hardware/hardware_configs"))
"""Default folders of hardware files: autopar's and Galvatron's."""


def hardware_folders() -> tuple[Path, ...]:
    """Return the default hardware folders that contain an all-reduce file."""
    return tuple(folder for folder in _HARDWARE_FOLDERS if _documents(folder, ALLREDUCE_FILES))


def site_files() -> tuple[Path, ...]:
    """Return the site files in the default folder of `torchrun -m profiler.site`."""
    return _documents(SITE_FOLDER, "site_*.json")


def model_folder(name: str, device: str | None = None) -> Path:
    """Return the default folder of a model's profile files.

    device : name of a device for the folder of its measured times; None: the common folder.
    """
    # Names become folder names.
    folder = Path("models") / (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model")
    if device is None:
        return folder / "configs"
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-").removeprefix("nvidia-")
    return folder / "configs" / slug


def model_folders(
    kind: Literal["computation", "memory"], precision: str, spec: ModelSpec
) -> tuple[Path, ...]:
    """Return the default folders that contain a profile file of a model.

    These are the model's common folder and its folders by device. Shipped times are estimates, so
    the common folder of a shipped model is omitted for `computation`.
    """
    own = model_folder(spec.name)
    try:
        inner = sorted(path for path in own.iterdir() if path.is_dir())
    except OSError:  # no such folder, or no permission
        return ()
    skipped = kind == "computation" and is_shipped_folder(own)
    return tuple(
        folder
        for folder in ([] if skipped else [own]) + inner
        if any(tier.paths for tier in _tiers(folder, kind, precision, spec))
    )


def is_shipped_folder(folder: Path) -> bool:
    """Return True if a folder of profile files was shipped with the package."""
    parent = folder.resolve().parent.parent
    return any(parent == (root / "models").resolve() for root in _ROOTS)


# --------------------------------------------------------------------------------------------------
# Input paths in plan files are relative to the file, so that a folder can be moved as a whole.


_Value = TypeVar("_Value")
_NAMED_INPUTS: dict[str, Callable[[], tuple[str, ...]]] = {
    "model": lambda: (*model_names(), *_PUBLISHED),
    "hardware": lambda: hardware_names(),
    "site": lambda: site_names(),
    "stack": lambda: stack_names(),
}
"""Shipped names that an option accepts in addition to paths, by option."""
_INPUT_PATHS = (
    *_NAMED_INPUTS,
    *("memory-profiling-path", "time-profiling-path", "allreduce-bandwidth-config-path"),
    *("p2p-bandwidth-config-path", "overlap-coe-path", "sp-time-path", "calibration"),
)
"""Options that may name a file or a folder."""


def portable_options(request: Mapping[str, _Value], file: Path | str) -> dict[str, _Value | str]:
    """Return options for storage in a file, with input paths relative to the folder of the file.

    Shipped names and absolute paths are unchanged.
    """
    found: dict[str, _Value | str] = dict(request)
    for option in _INPUT_PATHS:
        value = request.get(option)
        if not isinstance(value, str) or not value:
            continue
        path, shape = _split(option, value)
        if not Path(path).is_absolute() and _is_input(option, path):
            moved = _from(path, file)
            # A path that is spelled like a shipped name gets a prefix, so that it remains a path.
            shipped = moved in _NAMED_INPUTS.get(option, tuple)()
            found[option] = ("./" if shipped else "") + moved + shape
    return found


def portable_path(path: Path | str, file: Path | str) -> str:
    """Return the path of an input for storage in a file, relative to the folder of the file.

    The path of a shipped file is relative to the shipped data. Other absolute paths and paths that
    do not exist are unchanged.
    """
    if not _is_there(Path(path)):
        return str(path)
    shipped = shipped_path(path)
    if shipped is not None:
        return shipped
    return str(path) if Path(path).is_absolute() else _from(path, file)


def shipped_path(path: Path | str) -> str | None:
    """Return the path of a file within the shipped data, None for any other file."""
    whole = os.path.abspath(path)  # noqa: PTH100 - a link in it is not followed
    for root in _ROOTS:
        for folder in ("models", "hardware_configs"):
            if whole.startswith(f"{root / folder}{os.sep}"):
                return str(Path(whole).relative_to(root))
    return None


def _from(path: Path | str, file: Path | str) -> str:
    """Return a path relative to the folder of a file."""
    # Links of the file are resolved, since `..` after a link leads elsewhere.
    folder = os.path.dirname(os.path.realpath(file))  # noqa: PTH120
    return os.path.relpath(os.path.abspath(path), folder)  # noqa: PTH100


def located_options(
    request: Mapping[str, _Value], file: Path | str, typed: Collection[str] = ()
) -> tuple[dict[str, _Value | str], list[str]]:
    """Return (options of a file with paths relative to the current folder, notes on moved inputs).

    Stored paths are relative to the file. Files of earlier releases contain paths as typed. A
    missing path is therefore searched in the current folder and, with a note, in the parent of the
    file's folder.

    typed : options given on the command line, which override those of the file.
    """
    found: dict[str, _Value | str] = dict(request)
    notes: list[str] = []
    own = os.path.dirname(os.path.realpath(file))  # noqa: PTH120
    for option in _INPUT_PATHS:
        value = request.get(option)
        if not isinstance(value, str) or not value or option in typed:
            continue
        # A shipped name means the shipped data, whatever files are next to this file.
        if value in _NAMED_INPUTS.get(option, tuple)():
            continue
        path, shape = _split(option, value)
        if Path(path).is_absolute():
            continue
        places = [os.path.normpath(os.path.join(folder, path)) for folder in (own, "", f"{own}/..")]  # noqa: PTH118
        place = next((place for place in places if _is_there(Path(place))), None)
        if place is None or place == places[1]:
            continue
        # The relative path is shorter than an absolute one.
        found[option] = os.path.relpath(place) + shape
        if place == places[2]:
            notes.append(f"--{option} {value} is not in this folder; using {found[option]}")
    return found, notes


def require_inputs(
    request: Mapping[str, object], file: Path | str, typed: Collection[str] = ()
) -> None:
    """Raise DocumentError if options from `located_options` name paths that do not exist.

    typed : options given on the command line, which are not checked.
    """
    lost = []
    for option in _INPUT_PATHS:
        value = request.get(option)
        if not isinstance(value, str) or not value or option in typed:
            continue
        path, _ = _split(option, value)
        known = option == "model" and typed_repository(value)
        if not known and (os.sep in path or path.endswith(".json")) and not _is_there(Path(path)):
            lost.append(option)
    if lost:
        named = " and ".join(f"--{option} {request[option]!s:.90}" for option in lost)
        raise DocumentError(
            file,
            f"{named} not found, relative to this file",
            key=f"request.{lost[0]}",
            remedy=f"Copy it there, or give --{lost[0]}",
        )


def _split(option: str, value: str) -> tuple[str, str]:
    """Return (path, suffix) of an option's value; the suffix of CARD.json:NxG is `:NxG`."""
    path, colon, shape = value.rpartition(":")
    if option == "hardware" and colon and not _is_there(Path(value)):
        return path, f":{shape}"
    return value, ""


def _is_input(option: str, path: str) -> bool:
    """Return True if the value of an option is an existing path and not a shipped name."""
    if path not in _NAMED_INPUTS.get(option, tuple)():
        return _is_there(Path(path))
    where = Path(path)
    if option == "hardware":
        return where.is_dir()
    return where.is_file() or (option == "model" and (where / "model.json").is_file())


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # name too long, or with a null character
        return False


# --------------------------------------------------------------------------------------------------
# Shipped data and their location: packaged data first, then the repository.


DEFAULT_MODEL = "llama2-7b"
"""Model that is planned and profiled by default."""

_PUBLISHED: dict[str, tuple[str, int]] = {
    # LLaMA of 2023 has the blocks of Llama 2 and half of its context length.
    "llama-7b": ("llama2-7b", 2048),
    "llama-13b": ("llama2-13b", 2048),
    "llama": ("llama2-7b", 2048),
    # GPT-2 XL is the published model of this size.
    "gpt-1.5b": ("gpt2-xl", 1024),
    "bert-base-uncased": ("bert-base", 512),
    "bert-large-uncased": ("bert-large", 512),
    "bert-huge-uncased-32": ("bert-huge-32", 512),
    "mixtral-8x7b-e8k2": ("mixtral-8x7b", 4096),
}
"""(Shipped model of equal sizes, sequence length) by name in Galvatron's zoo."""
WITHOUT_SIZES = frozenset({"llama"})
"""Names of blocks, as in scripts of PaddleNLP: the user gives all sizes of a layer."""

_TUNED = re.compile(r"-(hf|instruct|chat|base|it|pt|v0\.1)(?=-|$)|(?<=qwen2\.5)-coder(?=-)")
"""Parts of repository names whose models have the sizes of the pre-trained model."""
_OTHER_NAMES = {
    **dict.fromkeys(
        ("deepseekr1", "deepseekr10528", "deepseekv30324", "deepseekv31", "deepseekv31terminus"),
        "deepseek-v3",
    ),
    "deepseekr1distillllama8b": "llama3-8b",
    "deepseekr1distillllama70b": "llama3-70b",
    "deepseekr1distillqwen14b": "qwen2.5-14b",
    "deepseekr1distillqwen32b": "qwen2.5-32b",
    "deepseekv32exp": "deepseek-v3.2",
    "granite40hsmall": "granite-4-small",
    "kimilinear48ba3b": "kimi-linear-48b",
    "llama4scout17b16e": "llama4-scout",
    "llama4maverick17b128e": "llama4-maverick",
    "mistralnemo2407": "mistral-nemo",
    "mistralsmall24b2501": "mistral-small",
    "nvidianemotron3nano30ba3bbf16": "nemotron-3-nano",
    "nvidianemotron3super120ba12bbf16": "nemotron-3-super",
    "qwen3next80ba3b": "qwen3-next-80b",
    "qwen3next80ba3bthinking": "qwen3-next-80b",
    "qwq32b": "qwen2.5-32b",
    "tinyllama11bv10": "tinyllama-1.1b",
    "vitlargepatch16224": "vit-l",
    "wan21t2v14bdiffusers": "wan2.1-14b",
}
"""Shipped model by repository name, in the form of `_letters`."""

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


def model_names() -> tuple[str, ...]:
    """Return the names of the shipped model specs, sorted."""
    return tuple(sorted(_files("models", "*/model.json", lambda p: p.parent.name)))


def card_names() -> tuple[str, ...]:
    """Return the names of the shipped device cards, sorted, without their aliases."""
    return tuple(sorted(_cards()))


def site_names() -> tuple[str, ...]:
    """Return the names of the shipped sites, sorted."""
    return tuple(sorted(_files("hardware_configs/sites", "*.json", lambda p: p.stem)))


def stack_names() -> tuple[str, ...]:
    """Return the names of the shipped software stacks, sorted."""
    return tuple(sorted(_files("hardware_configs/stacks", "*.json", lambda p: p.stem)))


def hardware_names() -> tuple[str, ...]:
    """Return the names of the shipped sets of hardware files, sorted."""
    return tuple(sorted(_hardware()))


def published_name(name: str) -> tuple[str, int] | None:
    """Return (shipped model, sequence length) for a model name of Galvatron's zoo, else None.

    None is also returned for an existing file, a folder with a `model.json`, and a shipped name.
    """
    path = Path(name)
    is_own = path.is_file() or (path / "model.json").is_file() or name in model_names()
    return None if is_own else _PUBLISHED.get(name)


def repository_name(name: str) -> str:
    """Return a repository name in lower case, without owner and suffixes of tuned variants.

    Llama 3.1 and 3.3 are named as Llama 3, whose layers have the same sizes.
    """
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"llama-?3\.[13]-", "llama-3-", _TUNED.sub("", last))


def shipped_model(name: str) -> str:
    """Return the shipped model with this name or alias, else the name unchanged.

    Repository names of Hugging Face and other spellings are accepted, such as `Qwen/Qwen3-32B` and
    `llama-3-8b`. Paths, shipped names and names of Galvatron's zoo are returned as they are.
    """
    if Path(name).exists() or name in model_names() or name in _PUBLISHED:
        return name
    asked = _letters(repository_name(name))
    known = {_letters(own): own for own in model_names()}
    return known.get(asked, _OTHER_NAMES.get(asked, name))


def typed_repository(name: object) -> str | None:
    """Return a repository name of a shipped model, which may be a tuned one; else None."""
    named = isinstance(name, str) and "/" in name and shipped_model(name) != name
    return str(name) if named else None


def _letters(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


def find_model(name: str) -> Path:
    """Return the spec file of a model.

    name : path of the file, path of a folder with a `model.json` or `config.json`, a name that
        `shipped_model` accepts, or name in Galvatron's zoo of a model of equal sizes.

    Raises InputError with the nearest names for an unknown name.
    """
    path = Path(name)
    if path.is_file():
        return path
    for file in ("model.json", "config.json"):
        if (path / file).is_file():
            return path / file
    shipped = _files("models", "*/model.json", lambda p: p.parent.name)
    published = published_name(name)
    own = shipped_model(name) if published is None else published[0]
    if own in shipped:
        return shipped[own]
    raise _unknown("model", name, shipped, "`autopar models`")


def find_configs(name: str) -> Path | None:
    """Return the folder of a shipped model's profile files; None for a model that is not shipped.

    Raises InputError like `find_model`.
    """
    path = find_model(name).resolve()
    shipped = _files("models", "*/model.json", lambda p: p.parent.name).values()
    return next((p.parent / "configs" for p in shipped if p.resolve() == path), None)


_CARDS = "`autopar cards`"
"""Command that lists the device cards, which do not fit on one line."""
_LISTINGS = {"cards": _CARDS, "stacks": "`autopar stacks`"}
"""Listing command by folder of `hardware_configs`."""


def find_card(name: str) -> Path:
    """Return the file of a device card: an existing path, a shipped name or one of its aliases.

    Raises InputError with the nearest names if there is none.
    """
    found = Path(name) if Path(name).is_file() else shipped_card(name)
    if found is None:
        raise _unknown("device card", name, {**_cards(), **_card_aliases()}, _CARDS)
    return found


def shipped_card(name: str) -> Path | None:
    """Return the file of a shipped card by its name or one of its aliases; None if unknown."""
    shipped = _cards()
    if name.lower() in shipped:
        return shipped[name.lower()]
    # Aliases come last, since every card has to be read for them.
    known = {**shipped, **_card_aliases()}
    return {_letters(own): path for own, path in known.items()}.get(_letters(name))


def _cards() -> Mapping[str, Path]:
    return _files("hardware_configs/cards", "*.json", lambda p: p.stem)


def _card_aliases() -> Mapping[str, Path]:
    return {alias: path for path in _cards().values() for alias in _aliases(path)}


def spelled_hardware(text: str) -> str:
    """Return hardware such as `8xh100`, `2x8xH100` or `h100x8` as `CARD:NODESxGPUS`.

    A single number is the number of GPUs of one node. Other texts are returned as they are, and so
    are names of folders and shipped profiles.
    """
    if Path(text).exists() or text in hardware_names():
        return text
    first = re.fullmatch(r"(?:([0-9]{1,6})[xX])?([0-9]{1,4})[xX]([A-Za-z][^:/]*)", text)
    if first is not None:
        return f"{first[3]}:{first[1] or 1}x{first[2]}"
    last = re.fullmatch(r"([A-Za-z0-9-]*[A-Za-z][A-Za-z0-9-]*)[xX]([0-9]{1,4})", text)
    return text if last is None else f"{last[1]}:1x{last[2]}"


def find_site(name: str) -> Path:
    """Return the file of a site: an existing path, or a shipped name.

    Raises InputError with the nearest names if there is none.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = _files("hardware_configs/sites", "*.json", lambda p: p.stem)
    if name.lower() in shipped:
        return shipped[name.lower()]
    raise _unknown("site", name, shipped, "`autopar sites`")


def find_hardware(name: str) -> Path:
    """Return the folder of a set of hardware files: an existing path, or a shipped name.

    Raises InputError with the nearest names if there is none.
    """
    if Path(name).is_dir():
        return Path(name)
    shipped = _hardware()
    if name in shipped:
        return shipped[name]
    raise InputError(
        f"no hardware {name!r}: neither a folder nor a shipped profile",
        remedy=did_you_mean(
            name,
            shipped,
            form="{}",
            otherwise="Use a card and the size of the cluster, such as h100:4x8 "
            f"(see {_CARDS}), or the shipped profile {', '.join(sorted(shipped))}",
        ),
    )


def find_document(folder: str, what: str, name: str) -> Path:
    """Return the file of a named document in a folder of `hardware_configs`.

    name : path of the file, shipped name, or alias of the card that the document belongs to.
    what : kind of document, for errors.

    Raises InputError with the nearest names for an unknown name.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = _files(f"hardware_configs/{folder}", "*.json", lambda p: p.stem)
    cards = _files("hardware_configs/cards", "*.json", lambda p: p.stem)
    aliases = {alias: path.stem for path in cards.values() for alias in _aliases(path)}
    found = shipped.get(name.lower()) or shipped.get(aliases.get(name.lower(), ""))
    if found is None:
        raise _unknown(what, name, shipped, _LISTINGS.get(folder, ""))
    return found


def _files(folder: str, pattern: str, key: Callable[[Path], str]) -> dict[str, Path]:
    """Return the shipped files that match a glob pattern, by name.

    Packaged data have priority over those of the repository.

    key : function from a path to the name of the file.
    """
    found: dict[str, Path] = {}
    for path in _paths(_ROOTS, folder, pattern):
        found.setdefault(key(path), path)
    return found


@cache
def _paths(roots: tuple[Path, ...], folder: str, pattern: str) -> tuple[Path, ...]:
    """Return the shipped files that match a glob pattern; they are listed once per process."""
    return tuple(path for root in roots for path in sorted((root / folder).glob(pattern)))


def _hardware() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for root in _ROOTS:
        for path in sorted((root / "hardware_configs").glob("*/allreduce_bandwidth_*.json")):
            found.setdefault(path.parent.name, path.parent)
    return found


def _aliases(path: Path) -> list[str]:
    try:
        aliases = json.loads(path.read_text(encoding="utf-8")).get("aliases", [])
    except (OSError, ValueError, AttributeError):
        return []  # a broken card is reported when it is read, not when names are listed
    return [str(alias) for alias in aliases] if isinstance(aliases, list) else []


_MAKERS = {
    "hopper": "h100 h200",
    "ampere": "a100",
    "blackwell": "b200 gb200",
    "lovelace": "l40s rtx 4090",
    "instinct": "mi300x",
}
"""Card names by the name of their device family."""
_ALIKE = 0.5
"""Smallest fraction of common words and numbers for a suggestion."""


def _parts(name: str) -> frozenset[str]:
    """Return the lower-case words and numbers of a name, such as {llama, 3.1, 8b}.

    Names of device families are replaced by names of their cards.
    """
    text = name.lower()
    for maker, cards in _MAKERS.items():
        text = text.replace(maker, cards)
    text = re.sub(r"(?<=[0-9])\s*(?:gib|gb|g)(?![a-z0-9])", "gb", text)
    return frozenset(
        re.findall(r"[0-9]+x[0-9]+b|[0-9]+(?:\.[0-9]+)?(?:gb|b|m)?|[a-z]+", text[:200])
    )


def _alike(name: str, names: Iterable[str]) -> list[str]:
    """Return at most three known names that share most words and numbers with a name, best first.

    Additional words of `name`, such as the publisher, have little weight, and so have those of a
    known name that has all of `name`.
    """
    from difflib import SequenceMatcher  # late: only needed after an error

    asked = _parts(name)
    scores: dict[str, float] = {}
    for known in names:
        own = _parts(known)
        shared = asked & own
        # At least one common word: numbers alone match anything.
        if any(part[0].isalpha() for part in shared):
            share = 1.0 if asked <= own else len(shared) / len(own)
            scores[known] = share * (0.8 + 0.2 * len(shared) / len(asked | own))
    most = max(scores.values(), default=0.0)
    if most < _ALIKE:
        return []
    best = [one for one in scores if scores[one] >= 0.95 * most]
    like = {one: SequenceMatcher(None, name.lower(), one).ratio() for one in best}
    return sorted(best, key=lambda one: (-scores[one], -like[one]))[:3]


def _unknown(what: str, name: str, known: Iterable[str], listing: str = "") -> InputError:
    """Return the error for a name that is neither a file nor shipped.

    what : kind of document.
    known, listing : see `_nearest`.
    """
    if name.endswith(".json") or name.startswith(("/", "./", "../", "~")):
        if Path(name).is_dir():
            problem = "this is a folder, expected a file"
            if what == "model":
                problem = "this folder contains no model.json or config.json"
            return DocumentError(name, problem)
        return DocumentError(name, "this file does not exist", remedy="Check the path")
    return InputError(
        f"no {what} {name!r}: neither a file nor a shipped {what.rpartition(' ')[2]}",
        remedy=_nearest(name, known, listing),
    )


def _nearest(name: str, known: Iterable[str], listing: str = "") -> str:
    """Return a suggestion: nearest names, else the listing command, else all names."""
    names = sorted(known)
    close = _alike(name, names) or nearest_words(name.lower(), names, most=3)
    if close:
        return f"Did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}?"
    if listing and names:
        return f"See {listing}"
    return f"Use {', '.join(names)}" if names else "Give a path"
