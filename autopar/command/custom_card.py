"""`autopar cards --like CARD ...`: a custom card with some values of another card replaced.

Options are in the units of the list of cards. In the written card, replaced values have the source
of `--source`, or the basis "given by hand"; the other values are copied together with their
sources.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.command.fields import option
from autopar.errors import InputError, OptionError
from autopar.units import GIB

_PANEL = "Custom card: figures that differ from a shipped one"
_KEYS = {
    "memory": ("device", "memory_bytes"),
    "hbm": ("device", "memory_bytes_per_s"),
    "bf16": ("device", "bf16_flop_per_s"),
    "gpus_per_node": ("intra_node", "max_gpus"),
    "in_node": ("intra_node", "bytes_per_s"),
    "between": ("inter_node", "bytes_per_s"),
    "host_memory": ("host", "memory_bytes"),
}
"""Option -> section and key of a card file."""
_WHOLE = {"memory", "gpus_per_node", "host_memory"}
"""Options whose values are rounded to integers."""


@dataclass(frozen=True, kw_only=True)
class CardSpec:
    """Options of a custom card, in bytes, bytes/s per GPU (links: per direction) and FLOP/s."""

    like: str | None = option(
        None, help="shipped card or card file to start from", panel=_PANEL, metavar="CARD"
    )
    memory: float | None = option(
        None, help="memory per GPU, GiB", panel=_PANEL, metavar="GIB", above=0.0, scale=GIB
    )
    hbm: float | None = option(
        None, help="HBM bandwidth, GB/s", panel=_PANEL, metavar="GB/S", above=0.0, scale=1e9
    )
    bf16: float | None = option(
        None,
        help="dense bf16 peak, TFLOP/s; other peaks are scaled with it",
        panel=_PANEL,
        metavar="TFLOP/S",
        above=0.0,
        scale=1e12,
    )
    gpus_per_node: int | None = option(
        None, help="largest number of GPUs per node", panel=_PANEL, metavar="N", low=1
    )
    in_node: float | None = option(
        None,
        help="intra-node bandwidth per GPU and direction, GB/s",
        panel=_PANEL,
        metavar="GB/S",
        above=0.0,
        high=1e4,
        scale=1e9,
    )
    between: float | None = option(
        None,
        help="inter-node bandwidth per GPU and direction, GB/s; a 400 Gbit/s adapter for two "
        "GPUs gives 25",
        panel=_PANEL,
        metavar="GB/S",
        above=0.0,
        high=1e4,
        scale=1e9,
    )
    host_memory: float | None = option(
        None,
        help="host memory per GPU, GiB",
        panel=_PANEL,
        metavar="GIB",
        above=0.0,
        scale=GIB,
    )
    source: str | None = option(None, help="source of the figures", panel=_PANEL, metavar="TEXT")
    out: Path | None = option(
        None, help="written card file, such as my_card.json", panel=_PANEL, metavar="FILE"
    )


def is_asked(spec: CardSpec) -> bool:
    """Return True if any option of a custom card is given; the command then prints no list."""
    return spec != CardSpec()


def like_card(spec: CardSpec) -> dict[str, Any]:
    """Return the document of the custom card.

    Its name is the file name without suffix. Aliases are dropped, because they belong to the base
    card. Raises OptionError for missing options, and InputError for an invalid card.
    """
    from autopar.documents.catalog import find_card
    from autopar.documents.json import load_object, read_record
    from autopar.rates.card import CardDocument

    if spec.like is None:
        raise OptionError(
            "a custom card needs a base card", remedy="Add --like CARD, such as --like h100"
        )
    if spec.out is None:
        raise OptionError("--like needs --out FILE", remedy="Add --out my_card.json")
    figures = {key: getattr(spec, key) for key in _KEYS if getattr(spec, key) is not None}
    if not figures:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in _KEYS)
        raise OptionError(
            f"--like {spec.like}: no value is changed", remedy=f"Add one of {options}"
        )
    found = load_object(find_card(spec.like))
    read_record(CardDocument, found.path, found.data)  # the source must be a valid card
    document = copy.deepcopy(dict(found.data))
    document["name"] = spec.out.stem
    document.pop("aliases", None)
    document["description"] = f"{document['description']}, with other figures"
    if spec.bf16 is not None:
        _scale_peaks(document, spec.bf16)
    for key, value in figures.items():
        section, name = _KEYS[key]
        if section not in document:
            raise InputError(
                f"{found.path}: the card has no {section!r}, so "
                f"--{key.replace('_', '-')} cannot replace it",
                remedy="Use a --like card that has it",
            )
        document[section][name] = {
            "value": round(value) if key in _WHOLE else value,
            **({"source": spec.source} if spec.source else {"basis": "given by hand"}),
        }
    if spec.gpus_per_node is not None:
        # the links of a rack belong to the base card; here a node is one domain and one host
        document.get("collectives", {}).pop("domain_gpus", None)
        document["intra_node"].pop("tray_gpus", None)
    # The new document is checked for plausible ranges as well.
    read_record(CardDocument, spec.out, document)
    return document


def _scale_peaks(document: dict[str, Any], bf16: float) -> None:
    """Scale the other FLOP/s peaks of a card, and its attention rates, with its new bf16 peak."""
    device = document["device"]
    share = bf16 / device["bf16_flop_per_s"]["value"]
    for kernel in document.get("kernels", {}).get("attention", {}).values():
        for figure in filter(None, kernel.values()):
            figure["value"]["flop_per_s"] *= share
    for name, figure in device.items():
        if name.endswith("_flop_per_s") and name != "bf16_flop_per_s":
            said = {"basis": "in proportion to the peak in bf16, which was given by hand"}
            device[name] = {"value": figure["value"] * share, **said}


def write_card(spec: CardSpec, *, command: str) -> dict[str, Any]:
    """Write the custom card to `--out` and return its document.

    Other content of an existing file is kept as `NAME.bak-N`. A message explains how to use the
    card. Raises errors like `like_card`, and OptionError if the file cannot be written.
    """
    from autopar.command.run import say, say_kept
    from autopar.documents.json import write_json

    document = like_card(spec)
    path = spec.out
    assert path is not None
    try:
        write_json(path, document, aside=say_kept(command))
    except OSError as error:
        raise OptionError(
            f"--out {path}: the file cannot be written ({error.strerror or error})",
            remedy="Use another path",
        ) from None
    gpus = document["intra_node"]["max_gpus"]["value"]
    say(f"{command}: wrote {path}. Use it as --hardware {path}:NODESx{gpus}")
    return document
