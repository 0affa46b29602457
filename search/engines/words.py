"""Text for exported files: shell variables, commands over several lines, layer ranges."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Protocol

RENDEZVOUS = '"${MASTER_ADDR:?set it to the first node}:${MASTER_PORT:-29500}"'
NODE_RANK = '"${NODE_RANK:?set it, 0 on the first node}"'


ROTARY_BASE = "set ROTARY_BASE to the base of rotary positions of the model"
"""Error message of the exported script if the rotary base is unknown and ROTARY_BASE unset."""


def required(name: str, message: str) -> str:
    """Return a shell expansion that stops the script with a message if the variable is unset."""
    return f"${{{name}:?{message}}}"


def one_line(name: str) -> str:
    """Return a name on a single line, for a comment."""
    return " ".join(name.split())


def inert(name: str) -> str:
    """Return a name with `${` replaced by `{`, so that OmegaConf does not interpolate it."""
    return name.replace("${", "{")


def layer_ranges(layers: Iterable[int]) -> str:
    """Return layer numbers as text: `layer 3`, `layers 0-3 and 8`, `layers 0, 2 and 5-7`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] + 1 == layer:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[1]}" for r in runs]
    if len(texts) == 1:
        return f"layer{'s' if '-' in texts[0] else ''} {texts[0]}"
    return f"layers {', '.join(texts[:-1])} and {texts[-1]}"


def per_value(values: Sequence[object]) -> str:
    """Return per-layer values as text, in the order of layers: `2 (layers 0-3), 4 (layers 4-7)`."""
    groups: dict[object, list[int]] = {}
    for layer, value in enumerate(values):
        groups.setdefault(value, []).append(layer)
    return ", ".join(
        f"{value} ({layer_ranges(layers)})"
        for value, layers in sorted(groups.items(), key=lambda item: item[1][0])
    )


class Nodes(Protocol):
    """Number and size of the nodes of a run; implemented by `ExportJob` and `ExportTarget`."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs per node."""


def torchrun(job: Nodes, script: Sequence[str] | str) -> str:
    """Return the torchrun command to run on each node, with the arguments of `script`.

    script : words, which are quoted for the shell, or shell text, which is used unchanged.

    With several nodes, MASTER_ADDR, MASTER_PORT and NODE_RANK come from the environment.
    """
    tail = script if isinstance(script, str) else " ".join(map(shlex.quote, script))
    # A single node needs no rendezvous address.
    if job.num_nodes == 1:
        where = ["--standalone"]
    else:
        where = [
            f"--node-rank {NODE_RANK}",
            f"--rdzv-backend c10d --rdzv-id autopar --rdzv-endpoint {RENDEZVOUS}",
        ]
    return shell_lines(
        [
            f"torchrun --nnodes {job.num_nodes} --nproc-per-node {job.gpus_per_node}",
            *where,
            tail,
        ]
    )


def shell_lines(parts: Sequence[str]) -> str:
    """Return one shell command with each part on a line; ends in a newline."""
    return " \\\n    ".join(parts) + "\n"
