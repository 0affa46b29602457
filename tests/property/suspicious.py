"""Input that is valid but implausible, and the notes of a command about it.

Every row starts from a command line that works, in the folder of `hostile.prepare_good`, and
changes one thing. Its notes are those that the good run does not print.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command_lines import last_said
from tests.e2e.bad_estimates_table import CALCULON as PRICED, TWO as PRICED_TWO
from tests.e2e.bad_explore_table import CALCULON as EXPLORED
from tests.e2e.bad_input_table import MEASURED
from tests.property.hostile import Run

_SMALL = ("--model", "config.json", "--hardware", "card.json:1x2", "--global-batch-size", "8")
_NONE = ("--output-config-path", "none")
_SHAPE = "1nodes_8gpus_per_node.json"


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """One implausible input."""

    what: str
    name: str
    good: tuple[str, ...]
    """Arguments of the run for comparison."""
    more: tuple[str, ...] = ()
    edit: Callable[[Path], None] | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def run(self, *, good: bool = False) -> Run:
        """Return the run, or the run for comparison."""
        return Run(
            seed=0,
            name=self.name,
            kind="suspicious",
            what=self.what,
            arguments=tuple(last_said((*self.good, *(() if good else self.more)))),
            environment={} if good else dict(self.environment),
        )


def _times(file: str, factor: float, *keys: str | int) -> Callable[[Path], None]:
    """Return an edit that multiplies numbers of a file; `*` stands for every key."""

    def change(node: Any, trail: tuple[str | int, ...]) -> None:
        key, rest = trail[0], trail[1:]
        places = (node if isinstance(node, dict) else range(len(node))) if key == "*" else [key]
        for place in list(places):
            if rest:
                change(node[place], rest)
            elif isinstance(node[place], int | float):
                node[place] = type(node[place])(node[place] * factor)

    def edit(folder: Path) -> None:
        path = folder / file
        before = path.read_text("utf-8")
        data = json.loads(before)
        change(data, keys)
        assert data != json.loads(before), "the row changes nothing"
        path.write_text(json.dumps(data), "utf-8")

    return edit


def _measured(what: str, edit: Callable[[Path], None]) -> Suspicion:
    return Suspicion(what=what, name="search", good=(*_NONE, *MEASURED), edit=edit)


def _asked(what: str, *more: str) -> Suspicion:
    return Suspicion(what=what, name="search", good=(*_NONE, *_SMALL), more=more)


_ALLREDUCE = f"allreduce_bandwidth_{_SHAPE}"
_P2P = f"p2p_bandwidth_{_SHAPE}"
_SP = f"sp_time_{_SHAPE}"

SUSPICIOUS = (
    _measured(
        "an all-reduce bandwidth 18 times too small",
        _times(_ALLREDUCE, 1 / 18, "allreduce_size_4_consec_1"),
    ),
    _measured(
        "an all-reduce bandwidth 18 times too large",
        _times(_ALLREDUCE, 18, "allreduce_size_4_consec_1"),
    ),
    _measured("all bandwidths a thousandth", _times(_ALLREDUCE, 1e-3, "*")),
    _measured("a transfer bandwidth 18 times too small", _times(_P2P, 1 / 18, "pp_size_2")),
    _measured("a transfer bandwidth of 20 TB/s", _times(_P2P, 1e3, "pp_size_2")),
    _measured("an overlap coefficient of 10", _times("overlap_coefficient.json", 8.0, "*")),
    Suspicion(
        what="a collective's time 18 times too small",
        name="search",
        good=(*_NONE, *MEASURED, "--sp-space", "tp+sp"),
        edit=_times(_SP, 1 / 18, "all2all_size_8_64MB_time"),
    ),
    Suspicion(
        what="a collective's time 18 times too large",
        name="search",
        good=(*_NONE, *MEASURED, "--sp-space", "tp+sp"),
        edit=_times(_SP, 18, "all2all_size_8_64MB_time"),
    ),
    _measured(
        "a layer's time 18 times too small",
        _times("computation.json", 1 / 18, "layertype_0_bsz1_seq4096"),
    ),
    _measured("all layers' times a thousandth", _times("computation.json", 1e-3, "*")),
    _measured(
        "parameters 18 times too small",
        _times("memory.json", 1 / 18, "layertype_0_sp", "4096", "parameter_size"),
    ),
    _asked("more memory than the GPU has", "--memory-constraint", "1000"),
    _asked("a reserve of five times what is allocated", "--reserve", "5"),
    _asked("a context of 70 GiB", "--context-gib", "70"),
    _asked("sequences of one token", "--seq-length", "1"),
    _asked("sequences of a hundred thousand tokens", "--seq-length", "100000"),
    _asked("a vocabulary of one word", "--vocab-size", "1"),
    _asked("a hidden size that the heads do not divide", "--hidden-size", "1000"),
    _asked("one layer", "--num-layers", "1"),
    _asked("a thousand layers", "--num-layers", "1000"),
    _asked("a batch of a million", "--global-batch-size", "1000000"),
    _asked("a batch that the GPUs do not divide", "--global-batch-size", "7"),
    _asked("a prime number of GPUs", "--hardware", "card.json:1x7"),
    _asked(
        "a thousand nodes for a small model",
        "--hardware",
        "card.json:1000x8",
        "--global-batch-size",
        "8000",
    ),
    _asked("one option twice", "--max-tp-deg", "1", "--max_tp_deg", "2"),
    _asked("no time", "--time-limit", "1e-9"),
    _asked("a tensor degree beyond the GPUs", "--max-tp-deg", "4096"),
    Suspicion(
        what="a card with a thousandth of its memory bandwidth",
        name="search",
        good=(*_NONE, *_SMALL),
        edit=_times("card.json", 1e-3, "device", "memory_bytes_per_s", "value"),
    ),
    Suspicion(
        what="a card with a thousand times its memory",
        name="search",
        good=(*_NONE, *_SMALL),
        edit=_times("card.json", 1e3, "device", "memory_bytes", "value"),
    ),
    Suspicion(
        what="a model with an MLP a hundredth as wide",
        name="search",
        good=(*_NONE, *_SMALL),
        edit=_times("config.json", 0.01, "intermediate_size"),
    ),
    Suspicion(
        what="inputs that changed since a plan was made",
        name="explain",
        good=("full_plan.json",),
        edit=_times("card.json", 0.5, "device", "bf16_flop_per_s", "value"),
    ),
    Suspicion(
        what="a network a million times as fast",
        name="estimate",
        good=PRICED,
        edit=_times("system.json", 1e6, "networks", 0, "bandwidth"),
    ),
    Suspicion(
        what="a network with a latency of seconds",
        name="estimate",
        good=PRICED,
        edit=_times("system.json", 1e6, "networks", 0, "latency"),
    ),
    Suspicion(
        what="a fast domain slower than the slow network",
        name="estimate",
        good=PRICED_TWO,
        edit=_times("two_system.json", 1e-3, "nvlink_bandwidth"),
    ),
    Suspicion(
        what="a vocabulary a thousandth as large",
        name="explore",
        good=EXPLORED,
        more=("--max-batch", "1"),
    ),
    Suspicion(
        what="one bandwidth of a measured folder 18 times too small",
        name="profile show",
        good=("shown", "--validate"),
        edit=_times(f"shown/{_ALLREDUCE}", 1 / 18, "allreduce_size_4_consec_1"),
    ),
    Suspicion(
        what="one time of a measured folder 18 times too small",
        name="profile show",
        good=("shown", "--validate"),
        edit=_times(f"shown/{_SP}", 1 / 18, "allreduce_size_8_64MB_time"),
    ),
    Suspicion(
        what="sizes of a model that a switch makes useless",
        name="search",
        good=(*_NONE, *_SMALL),
        more=("--set_layernum_manually", "0", "--num-layers", "2"),
    ),
)


def news(good: str, found: str) -> list[str]:
    """Return the sentences and notes of a text that another one lacks; wrapped ones are joined."""
    old = set(_items(good))
    return [one for one in _items(found) if one not in old]


def _items(text: str) -> list[str]:
    lines = re.sub(r"\n {4,}(?=\S)", " ", text).split("\n")
    kept = [
        re.sub(r"^ *- ", "", one).strip()
        for one in lines
        if re.match(r" +- |[a-z-]+: |.*\b(warning|suspicious|WARNING)\b", one)
    ]
    return [one for one in kept if one and not re.search(r"sha256|\d (ms|s) of CPU", one)]
