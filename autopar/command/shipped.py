"""`autopar models`, `cards`, `stacks`, `sites`: tables of shipped data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from autopar.command.card import CardSpec, is_asked, write_card
from autopar.command.fields import json_option, make, option, read_values
from autopar.command.options import Command
from autopar.units import GIB

What = Literal["models", "cards", "stacks", "sites"]


@dataclass(frozen=True, kw_only=True)
class ListSpec:
    """Options of a list."""

    json: str | None = json_option("Output")


@dataclass(frozen=True, kw_only=True)
class ModelListSpec(ListSpec):
    """Options of the list of models."""

    all: bool = option(False, help="list older models too", panel="Output")


@dataclass(frozen=True, kw_only=True)
class CardListSpec(ListSpec):
    """Options of the list of cards."""

    verbose: bool = option(False, help="print full device names and data sources", panel="Output")


COMMAND = Command(
    name="autopar models",
    fills=(ModelListSpec,),
    intro="List the shipped models: names for --model.",
)
_CARDS = Command(
    name="autopar cards",
    fills=(CardListSpec, CardSpec),
    intro="""List the shipped GPUs: names for --hardware CARD:NODESxGPUS and --system.

Figures and sources are in hardware_configs/cards. For a cluster that differs in a few figures,
write a custom card: autopar cards --like h100 --between 12.5 --out my_card.json
""",
)


_SITES = Command(
    name="autopar sites",
    fills=(ListSpec,),
    intro="""List the measured clusters: names for --site, with the achieved share of the card.

`torchrun ... -m profiler.site` measures your cluster. Figures and sources are in
hardware_configs/sites.
""",
)


_STACKS = Command(
    name="autopar stacks",
    fills=(ListSpec,),
    intro="""List the software stacks of engines: names for --stack.

Figures and sources are in hardware_configs/stacks.
""",
)


def main() -> None:
    """Entry point of all lists; the last word of the process name selects one."""
    word = sys.argv[0].rpartition(" ")[2]
    sys.exit(run(sys.argv[1:], next(what for what in _LISTS if word.endswith(what))))


def run(arguments: Sequence[str], what: What) -> int:
    """Run one of the lists with these arguments and return its exit code."""
    listed = _LISTS[what]
    return listed.command.run(arguments, lambda raw: _print(listed, raw))


def _print(listed: _List, raw: dict[str, Any]) -> int:
    asked: Any = make(listed.command.fills[0], read_values(listed.command.rows, raw))
    from autopar.command.console import make_console
    from autopar.command.show import print_plain, print_table, write_result

    if listed.command is _CARDS:
        spec = make(CardSpec, read_values(listed.command.rows, raw))
        if is_asked(spec):
            card = write_card(spec, command=listed.command.name)
            write_result(asked.json, {"card": card}, command=listed.command.name)
            return 0
    rows = listed.rows()
    if not write_result(asked.json, {listed.what: rows}, command=listed.command.name):
        return 0
    table = listed.table(rows, asked)
    console = make_console(sys.stdout)
    print_table(console, table.columns, table.cells, left=table.left)
    for line in table.legend:
        print_plain(console, line, style="dim")
    return 0


def model_rows() -> list[dict[str, Any]]:
    """Return name, parameters and shape of every shipped model."""
    from autopar.documents.catalog import model_names
    from autopar.documents.spec import load_spec
    from autopar.run.model import embedding_parameter_counts, parameter_count

    rows = []
    for name in model_names():
        spec = load_spec(name)
        layer = spec.layers[0]
        # the first layers of DeepSeek, GLM, Kimi and Llama 4 are dense
        experts = next((one for one in spec.layers if one.num_experts), layer)
        layers = sum(kind.num_layers * parameter_count(kind) for kind in spec.layers)
        # Without a known vocabulary only positions and norms are counted.
        vocab = sum(embedding_parameter_counts(spec, spec.vocab_size or 0))
        rows.append(
            {
                "name": name,
                "num_parameters": layers + vocab,
                "num_layers": spec.num_layers,
                "hidden_size": layer.hidden_size,
                "num_heads": layer.num_heads,
                "num_kv_heads": layer.num_kv_heads or layer.num_heads,
                "num_experts": experts.num_experts or 0,
                "experts_per_token": experts.experts_per_token or 0,
                "vocab_size": spec.vocab_size,
                "seq_length": layer.seq_length,
            }
        )
    return rows


def card_rows() -> list[dict[str, Any]]:
    """Return name, memory, peaks and network of every shipped card, in base units."""
    from autopar.documents.catalog import card_names
    from autopar.rates.card import load_card

    return [
        {
            "name": name,
            "description": card.description,
            "memory_bytes": card.memory_bytes,
            "memory_bytes_per_s": card.memory_bytes_per_s,
            "bf16_flop_per_s": card.flop_per_s["bf16"],
            "gpus_per_node": card.max_gpus_per_node,
            "intra_node_bytes_per_s": card.intra_node.bytes_per_s,
            "inter_node_bytes_per_s": card.inter_node.bytes_per_s,
        }
        for name in card_names()
        for card in (load_card(name),)
    ]


def site_rows() -> list[dict[str, Any]]:
    """Return card, factors and adapters of every shipped site, in base units.

    None means the value of the card.
    """
    from autopar.documents.catalog import site_names
    from autopar.rates.site import load_site

    return [
        {
            "name": name,
            "card": site.card,
            "description": site.description,
            "gpus_per_node": site.gpus_per_node,
            "clock": site.clock,
            "memory_share": site.memory_share,
            "in_node": site.in_node,
            "cross_node": site.cross_node,
            "adapter_bytes_per_s": site.adapter_bytes_per_s,
            "quality": dict(site.quality),
        }
        for name in site_names()
        for site in (load_site(name),)
    ]


def stack_rows() -> list[dict[str, Any]]:
    """Return name, kernels, host overhead and overlap of every shipped stack, in base units."""
    from autopar.documents.catalog import stack_names
    from autopar.rates.stack import load_stack

    return [
        {
            "name": name,
            "description": stack.description,
            "attention": list(stack.attention),
            "host_forward_s": stack.figures.host["forward_s"],
            "host_backward_s": stack.figures.host["backward_s"],
            "host_collective_s": stack.figures.host["collective_s"],
            "tensor_hidden": stack.figures.overlap["tensor"],
            "fully_sharded_visible": stack.figures.overlap["fully_sharded"],
            "gradients_hidden": stack.figures.overlap["gradients"],
        }
        for name in stack_names()
        for stack in (load_stack(name),)
    ]


_OLDER = frozenset(
    {
        *("bert-large", "gpt-6.7b", "gpt2-xl", "llama2-13b", "llama2-70b", "llama2-7b"),
        *("deepseek-v2-lite", "mistral-7b", "t5-3b"),
    }
)
"""Models that `autopar models` lists with `--all` alone."""


class _Table(NamedTuple):
    """Columns, rows of cells, and lines below them."""

    columns: list[str]
    cells: list[list[str]]
    left: int = 1
    """Number of text columns at the left."""
    legend: tuple[str, ...] = ()


def _model_table(rows: list[dict[str, Any]], asked: ModelListSpec) -> _Table:
    shown = [row for row in rows if asked.all or row["name"] not in _OLDER]
    cells = [
        [
            row["name"],
            f"{row['num_parameters'] / 1e9:.2f}",
            str(row["num_layers"]),
            f"{row['hidden_size']:,}",
            f"{row['num_heads']} ({row['num_kv_heads']})",
            f"{row['num_experts']} ({row['experts_per_token']})" if row["num_experts"] else "-",
            f"{row['seq_length']:,}",
        ]
        for row in shown
    ]
    hidden = len(rows) - len(shown)
    return _Table(
        columns=[
            "name",
            "params, B",
            "layers",
            "hidden",
            "heads (KV)",
            "experts (top k)",
            "tokens",
        ],
        cells=cells,
        legend=(
            *([f"{hidden} older models: --all"] if hidden else []),
            "Other models: --model PATH (config.json of a supported family)",
        ),
    )


_CARD_LEGEND = (
    "GiB: memory. TFLOP/s: dense bf16 peak. HBM, intra-node, inter-node: GB/s per GPU.",
    "Any other GPU: autopar cards --like CARD --help. Full names: --verbose",
)


def _card_table(rows: list[dict[str, Any]], asked: CardListSpec) -> _Table:
    # GB/s and TFLOP/s are powers of ten, as in datasheets; memory is in GiB.
    cells = [
        [
            row["name"],
            row["description"].partition(" in ")[0] if asked.verbose else "",
            f"{row['memory_bytes'] / GIB:.1f}",
            f"{row['bf16_flop_per_s'] / 1e12:,.0f}",
            f"{row['memory_bytes_per_s'] / 1e9:,.0f}",
            str(row["gpus_per_node"]),
            f"{row['intra_node_bytes_per_s'] / 1e9:,.0f}",
            f"{row['inter_node_bytes_per_s'] / 1e9:,.1f}",
        ]
        for row in rows
    ]
    return _Table(
        columns=["name", "device", "GiB", "TFLOP/s", "HBM", "GPUs", "intra-node", "inter-node"],
        cells=cells,
        left=2,
        legend=_CARD_LEGEND,
    )


def _site_table(rows: list[dict[str, Any]], asked: ListSpec) -> _Table:
    columns = ["site", "card", "GPUs", "clock", "HBM", "in node", "across", "adapters"]

    def factor(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    cells = [
        [
            row["name"],
            row["card"] or "",
            str(row["gpus_per_node"] or ""),
            *(factor(row[key]) for key in ("clock", "memory_share", "in_node", "cross_node")),
            # Per GPU and direction, as in cards.
            f"{row['adapter_bytes_per_s'] / 1e9:,.2f} GB/s" if row["adapter_bytes_per_s"] else "",
        ]
        for row in rows
    ]
    return _Table(columns=columns, cells=cells, left=2)


def _stack_table(rows: list[dict[str, Any]], asked: ListSpec) -> _Table:
    columns = ["stack", "what", "attention", "host ms", "tensor", "ZeRO-3", "gradients"]
    cells = [
        [
            row["name"],
            row["description"].partition(":")[0].partition(",")[0],
            ", ".join(row["attention"]),
            f"{row['host_forward_s'] * 1e3:.2g} + {row['host_backward_s'] * 1e3:.2g}",
            _percent(row["tensor_hidden"]),
            # Exposed communication exceeds the shorter of both where it slows compute down.
            _percent(max(0.0, 1.0 - row["fully_sharded_visible"])),
            _percent(row["gradients_hidden"]),
        ]
        for row in rows
    ]
    return _Table(columns=columns, cells=cells, left=3, legend=(_STACK_LEGEND,))


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


_STACK_LEGEND = (
    "host ms: of one layer, forward + backward; then how much is hidden of tensor-parallel "
    "collectives, and of ZeRO-3's traffic or the compute beside it; gradients: the share of a "
    "micro-batch under which their reduction hides"
)


class _List(NamedTuple):
    """One of the lists: its command, its rows and its table."""

    what: What
    command: Command
    rows: Callable[[], list[dict[str, Any]]]
    table: Callable[[list[dict[str, Any]], Any], _Table]
    """Table of the rows for the options of the list."""


_LISTS: dict[What, _List] = {
    "models": _List("models", COMMAND, model_rows, _model_table),
    "cards": _List("cards", _CARDS, card_rows, _card_table),
    "sites": _List("sites", _SITES, site_rows, _site_table),
    "stacks": _List("stacks", _STACKS, stack_rows, _stack_table),
}
