"""`autopar models`, `cards`, `stacks`, `sites`: tables of shipped data."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from autopar.command.console import Console, escape, make_console
from autopar.command.custom_card import CardSpec, is_asked, write_card
from autopar.command.fields import json_option, make, option, read_values
from autopar.command.options import Command
from autopar.units import GIB

_WIDTH = 80
"""Width of the tables without a terminal, columns."""
What = Literal["models", "cards", "stacks", "sites"]


@dataclass(frozen=True, kw_only=True)
class ListSpec:
    """Options of a list."""

    json: str | None = json_option("Output")


@dataclass(frozen=True, kw_only=True)
class ModelListSpec(ListSpec):
    """Options of the list of models."""

    all: bool = option(False, help="list all models, also small and older ones", panel="Output")


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


def run(arguments: Sequence[str], what: What | None = None) -> int:
    """Run the list command `what` with these arguments and return its exit code.

    what : None for the list that the name of the process ends in
    """
    word = what or sys.argv[0]
    listed = next(one for name, one in _LISTS.items() if word.endswith(name))
    return listed.command.run(arguments, lambda raw: _print(listed, raw))


def _print(listed: _List, raw: dict[str, Any]) -> int:
    asked: Any = make(listed.command.fills[0], read_values(listed.command.rows, raw))
    from autopar.command.show import write_result

    if listed.command is _CARDS:
        spec = make(CardSpec, read_values(listed.command.rows, raw))
        if is_asked(spec):
            card = write_card(spec, command=listed.command.name)
            write_result(asked.json, {"card": card}, command=listed.command.name)
            return 0
    rows = listed.rows()
    if not write_result(asked.json, {listed.what: rows}, command=listed.command.name):
        return 0
    console = make_console(sys.stdout, _WIDTH)
    for table in listed.tables(rows, asked):
        table.show(console)
    return 0


def model_rows() -> list[dict[str, Any]]:
    """Return name, parameters and shape of every shipped model."""
    from autopar.documents.catalog import model_names
    from autopar.documents.spec import load_spec
    from autopar.run.model import embedding_parameter_counts, parameter_count

    rows = []
    for name in model_names():
        spec = load_spec(name)
        # a hybrid may begin with a layer without attention
        layer = next((one for one in spec.layers if one.num_heads), spec.layers[0])
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

    None: not measured, so that the value of the card is used.
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


_SHOWN = frozenset(
    {
        *("deepseek-v3", "deepseek-v3.2", "flux.1-dev", "gemma-4-26b-a4b", "gemma-4-31b"),
        *("glm-4.5-air", "glm-5"),
        *("gpt-oss-120b", "gpt-oss-20b", "granite-4-small", "kimi-k2", "llama3-405b"),
        *("llama3-70b", "llama3-8b"),
        *("nemotron-3-nano", "nemotron-3-super", "qwen3-235b-a22b"),
        *("qwen3-30b-a3b", "qwen3-32b", "qwen3-8b", "qwen3-next-80b"),
    }
)
"""Models that `autopar models` lists without `--all`."""


class _Table(NamedTuple):
    """Columns, cells and legend of a printed table."""

    columns: list[str]
    cells: list[list[str]]
    left: int = 1
    """Number of text columns at the left."""
    units: tuple[str, ...] = ()
    """Second line of the column names; empty for none."""
    words_last: bool = False
    """True if the last column is text as well."""
    legend: tuple[str, ...] = ()

    def show(self, console: Console) -> None:
        """Print the table and its legend."""
        from autopar.command.show import make_table, print_plain

        table = make_table(*self.columns, left=self.left, words_last=self.words_last, ruled=False)
        for cells in (self.units, *self.cells) if self.units else self.cells:
            table.add_row(*map(escape, cells))
        console.print(table)
        for line in self.legend:
            print_plain(console, line, style="dim")


_SOME_OTHERS = "gemma, llama, mixtral, t5, vit, ..."


def _model_tables(rows: list[dict[str, Any]], asked: ModelListSpec) -> Iterator[_Table]:
    from autopar.families.config import family_names

    families = f": {', '.join(family_names())}" if asked.all else ""
    shown = [row for row in rows if asked.all or row["name"] in _SHOWN]
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
    yield _Table(
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
            *([f"{hidden} other models ({_SOME_OTHERS}) and all families: --all"] * bool(hidden)),
            f"Other models: --model PATH (config.json of a supported family{families})",
        ),
    )


_OLDER_CARDS = frozenset({"a100-pcie-80gb", "a10g", "v100"})
"""Cards that `autopar cards` lists only with `--verbose`."""
_CARD_LEGEND = "Other GPUs: autopar cards --like CARD --help. Older ones, sources: --verbose"
_CARD_SOURCES = (
    "Dense peaks; bandwidths in one direction. The source of each figure is in",
    "hardware_configs/cards/NAME.json.",
    "Any other GPU: autopar cards --like CARD --help",
)


def _card_tables(rows: list[dict[str, Any]], asked: CardListSpec) -> Iterator[_Table]:
    # GB/s and TFLOP/s are powers of ten, as in datasheets; memory is in GiB.
    cells = [
        [
            row["name"],
            f"{row['memory_bytes'] / GIB:.1f}",
            _peak(row),
            f"{row['memory_bytes_per_s'] / 1e9:,.0f}",
            str(row["gpus_per_node"]),
            f"{row['intra_node_bytes_per_s'] / 1e9:,.0f}",
            f"{row['inter_node_bytes_per_s'] / 1e9:,.1f}",
        ]
        for row in rows
        if asked.verbose or row["name"] not in _OLDER_CARDS
    ]
    yield _Table(
        columns=["name", "memory", "bf16 peak", "HBM", "GPUs/", "intra-node", "inter-node"],
        units=("", "GiB", "TFLOP/s", "GB/s", "node", "GB/s/GPU", "GB/s/GPU"),
        cells=cells,
        legend=("",) if asked.verbose else (_CARD_LEGEND,),
    )
    if asked.verbose:
        # The number of GPUs per node is in the table above.
        names = [
            [row["name"], re.split(r",(?: up to)? eight| in ", row["description"])[0]]
            for row in rows
        ]
        yield _Table(columns=["name", "device"], cells=names, left=2, legend=_CARD_SOURCES)


def _peak(row: dict[str, Any]) -> str:
    """Return the bf16 peak of a card in TFLOP/s, with its fp16 peak if that is higher."""
    from autopar.rates.card import load_card

    bf16, fp16 = row["bf16_flop_per_s"], load_card(row["name"]).flop_per_s["fp16"]
    text = f"{bf16 / 1e12:,.0f}"
    return f"{text} (fp16 {fp16 / 1e12:,.0f})" if fp16 > bf16 else text


def _site_tables(rows: list[dict[str, Any]], asked: ListSpec) -> Iterator[_Table]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    cells = [
        [
            row["name"],
            row["card"] or "-",
            str(row["gpus_per_node"] or "-"),
            *(share(row[key]) for key in ("clock", "memory_share", "in_node", "cross_node")),
            # Per GPU and direction, as in cards.
            f"{row['adapter_bytes_per_s'] / 1e9:,.2f}" if row["adapter_bytes_per_s"] else "-",
        ]
        for row in rows
    ]
    yield _Table(
        columns=["name", "card", "GPUs/", "clock", "HBM", "intra-node", "inter-node", "adapter"],
        units=("", "", "node", "share", "share", "share", "share", "GB/s/GPU"),
        cells=cells,
        left=2,
        legend=(
            "share: measured over the figure of the card. -: not measured, the card counts",
            "Your cluster: torchrun --standalone --nproc-per-node 8 -m profiler.site",
        ),
    )


def _stack_tables(rows: list[dict[str, Any]], asked: ListSpec) -> Iterator[_Table]:
    cells = [
        [
            row["name"],
            f"{row['host_forward_s'] * 1e3:.2g}",
            f"{row['host_backward_s'] * 1e3:.2g}",
            _percent(row["tensor_hidden"]),
            # Exposed communication exceeds the shorter of both where it slows compute down.
            _percent(max(0.0, 1.0 - row["fully_sharded_visible"])),
            _percent(row["gradients_hidden"]),
        ]
        for row in rows
    ]
    yield _Table(
        columns=["name", "host forward", "host backward", "TP comm", "ZeRO-3 comm", "DP comm"],
        units=("", "ms/layer", "ms/layer", "hidden", "hidden", "hidden"),
        cells=cells,
        legend=(
            "hidden: share of the communication that overlaps with compute; of DP comm the",
            "share of a micro-batch that the gradient reduction overlaps with",
            "",
        ),
    )
    yield _Table(
        columns=["name", "software", "attention kernels"],
        cells=[
            [
                row["name"],
                row["description"].partition(":")[0].partition(",")[0],
                ", ".join(row["attention"]),
            ]
            for row in rows
        ],
        left=3,
    )


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


class _List(NamedTuple):
    """A list command, and the functions that make its rows and tables."""

    what: What
    command: Command
    rows: Callable[[], list[dict[str, Any]]]
    tables: Callable[[list[dict[str, Any]], Any], Iterator[_Table]]
    """Tables of the rows for the options of the list."""


_LISTS: dict[What, _List] = {
    "models": _List("models", COMMAND, model_rows, _model_tables),
    "cards": _List("cards", _CARDS, card_rows, _card_tables),
    "sites": _List("sites", _SITES, site_rows, _site_tables),
    "stacks": _List("stacks", _STACKS, stack_rows, _stack_tables),
}
