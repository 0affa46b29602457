"""Which engines there are, and what exporters take and give: a job in, files and losses out."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar, get_args

from msgspec import field

from autopar.command.fields import rows_of, words_of, written
from autopar.records import Record
from autopar.run.model import ModelSpec
from autopar.run.plan import Plan
from search.request.options import Engine, SearchOptions

ALIKE = 0.005
"""Share by which steps of one plan differ between the planner's price and that of a launch, in the
median: docs/analytic.md. A plan whose layers may differ has to be faster by more."""
EXPORTERS: tuple[str, ...] = get_args(Engine)
_FOLDERS = {"accelerate": "huggingface"}
"""Folder of an engine, where it has another name."""
_IMPORT_MODULES = {
    "galvatron": "galvatron.plan",
    "megatron": "megatron.arguments",
    "paddlenlp": "paddlenlp.plan",
}
"""By engine the module here that reads its configurations with `import_NAME`."""
IMPORTERS = tuple(_IMPORT_MODULES)
"""Engines whose configurations are read."""

SearchFields = tuple[tuple[str, Any], ...]
"""(field of `SearchOptions`, value), in the order in which one would type them."""


class Job(Record):
    """A plan and everything else that a launch needs."""

    plan: Plan
    spec: ModelSpec
    model: str
    """As the user named it: a shipped name or a file."""
    num_nodes: int
    gpus_per_node: int
    sequence_parallel: bool = True
    async_grad_reduce: bool = True
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp32_gradients: bool = True
    tp_overlap: bool = True
    tensor_degree: int | None = None
    """The one tensor (or Ulysses) degree to take for a plan of several where the engine has one;
    None: the largest of the plan. `autopar-export` prices every one and takes the fastest that
    fits; a plan of one degree keeps it whatever this says."""

    @property
    def seq_length(self) -> int:
        """Tokens per sample of the last layer type."""
        return self.spec.layers[-1].seq_length


class Loss(Record):
    """One thing that the engine cannot express."""

    field: str
    """Key of the strategy file, such as `tp_sizes_enc`."""
    what: str
    """One sentence: what the plan says, for which layers, and what the engine takes instead."""


class Lowered(Record):
    """A plan as one engine takes it."""

    engine: Engine
    engine_version: str
    """Release that the keys were taken from."""
    plan: Plan
    """What the files make the engine do; the plan itself where nothing is lost."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    losses: tuple[Loss, ...]
    """Empty when the engine does exactly what the plan says."""
    launch: str
    """The command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...] = ()
    """What the user has to know besides: memory-neutral choices, keys to fill in."""
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    """Fields of `SearchOptions` as the engine runs the plan, where they differ from the job's; the
    plan is priced with them."""
    search: SearchFields = ()
    """Options of a search that finds plans which the engine runs as they were priced, of the
    degrees of this one; empty where any search does."""


Lower = Callable[[Job], Lowered]
"""Raises InputError, one sentence, where the engine has nothing near the plan at all."""


class Part(TypedDict, total=False):
    """Fields of `SearchOptions` that span a part of an engine's space."""

    max_pp_deg: int
    fine_grained_mode: bool
    default_dp_type: Literal["ddp", "zero1", "zero2", "any"]
    disable_sdp: bool
    disable_cp: bool
    disable_tp_consec: bool
    async_grad_reduce: bool
    sequence_parallel: bool
    fp32_gradients: bool
    memory_of: Engine
    tp_overlap: bool
    cp_kind: Literal["ring", "all-gather"]
    pp_division: tuple[int, ...]
    pin: tuple[str, ...]
    forbid: tuple[str, ...]


class Space(Record):
    """The plans that an engine runs as they are: `SPACE` of its module, what `--engine` searches.

    Every part is searched exactly, and what the exporter would lose of its best plan is left out.
    """

    parts: tuple[tuple[Part, str], ...] = ()
    """Options, and rules beside the degree; none where the engine runs every plan."""
    one_degree: bool = True
    """Embedding, head and all layers have one tensor degree: each is a part of its own."""
    context: bool = False
    """They have one context degree too, each a part of its own; else they have none."""
    gathers: bool = False
    """Context ranks gather keys and values before they are used, and have no ring."""
    whole_sequences: bool = False
    """Keeps whole sequences between the blocks of tensor parallelism."""
    priced: Part = field(default_factory=Part)
    """Options that hold for all parts: what the engine does otherwise than the search by default,
    its memory aside, which is `--memory-of`."""
    stack: str | None = None
    """Whose kernels and host code times are estimated with; None: the default one's."""


class Imported(Record):
    """A plan that was found in an engine's configuration."""

    plan: Plan
    notes: tuple[str, ...]
    """What a plan does not say, and how to price it; what was read in two ways."""
    strategy_path: Path | None = None
    """The file that holds the plan, where the configuration only names it."""


Import = Callable[..., Imported]
"""Takes a Configuration, world_size and num_layers."""


def _plans_of(engine: str) -> Any:
    """Return the module that writes plans for an engine, one of EXPORTERS."""
    return importlib.import_module(f"search.engines.{_FOLDERS.get(engine, engine)}.plan")


def lower_for(engine: str) -> Lower:
    """Return what lowers a plan for an engine, one of EXPORTERS."""
    lower: Lower = _plans_of(engine).lower
    return lower


def space_of(engine: str) -> Space:
    """Return the plans that an engine runs as they are, one of EXPORTERS."""
    space: Space = _plans_of(engine).SPACE
    return space


def importer_for(engine: str) -> Import:
    """Return what reads the configurations of an engine, one of IMPORTERS."""
    module = importlib.import_module(f"search.engines.{_IMPORT_MODULES[engine]}")
    importer: Import = getattr(module, f"import_{engine}")
    return importer


# --------------------------------------------------------------------------------------------------
# What exporters share: layers as ranges, commands in lines, launches.


_H = TypeVar("_H", bound=Hashable)
RENDEZVOUS = '"${MASTER_ADDR:?set it to the first node}:${MASTER_PORT:-29500}"'
NODE_RANK = '"${NODE_RANK:?set it, 0 on the first node}"'

SCRIPT_WEIGHTS = '${LOAD:+--model_name_or_path "$LOAD"} ${SAVE:+--output_dir "$SAVE"}'
"""Options of a training script of the user, by the names that the examples of transformers have."""
SCRIPT_NOTE = (
    "LOAD names weights of Hugging Face and SAVE a folder: train.py gets them as "
    "--model_name_or_path and --output_dir"
)

ROTARY_BASE = "set ROTARY_BASE to the base of rotary positions of the model"
"""What is asked for where a spec does not hold it."""


def further_parts(spec: ModelSpec) -> tuple[str, ...]:
    """Return what a model has that no plan is written with: names of parts, in the field's words.

    Writers of plans know heads, MLPs and equal experts; they refuse a model with more by these.
    """
    found = {
        "latent attention": any(layer.latent is not None for layer in spec.layers),
        "windows of attention": any(
            layer.window is not None and layer.window < layer.seq_length for layer in spec.layers
        ),
        "shared experts": any(layer.shared_expert_width for layer in spec.layers),
        "sinks of attention": any(layer.attention_sinks for layer in spec.layers),
        "norms behind or in the place of others": any(
            layer.num_norms is not None for layer in spec.layers
        ),
        "norms of all queries": any(layer.wide_qk_norms for layer in spec.layers),
        "experts with biases": any(
            layer.router_biases or (layer.biases and layer.num_experts is not None)
            for layer in spec.layers
        ),
        "modules of further tokens": spec.mtp_layers > 0,
    }
    return tuple(what for what, there in found.items() if there)


def has_one_kind(spec: ModelSpec) -> bool:
    """Return whether all layers are self-attending ones of one shape, whatever their runs."""
    shapes = {
        (x.hidden_size, x.num_heads, x.seq_length, x.ffn_hidden_size, x.num_experts)
        for x in spec.layers
    }
    return len(shapes) == 1 and not any(layer.cross_attention for layer in spec.layers)


def samples_of_a_rank(plan: Plan) -> int:
    """Return the samples of a micro-batch on one data rank of a plan whose layers are alike."""
    return plan.global_batch // (plan.num_microbatches * plan.data_degree(0))


def required(name: str, message: str) -> str:
    """Return a variable for a shell, which ends with a message where it is unset or empty."""
    return f"${{{name}:?{message}}}"


def one_line(name: str) -> str:
    """Return a name that a comment of one line can hold."""
    return " ".join(name.split())


def inert(name: str) -> str:
    """Return a name that OmegaConf leaves as it is: `${HOME}` stands for something in any text."""
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


def per_value(values: Sequence[_H], text: Callable[[_H], str] = str) -> str:
    """Return per-layer values as text, in the order of layers: `2 (layers 0-3), 4 (layers 4-7)`."""
    groups: dict[_H, list[int]] = {}
    for layer, value in enumerate(values):
        groups.setdefault(value, []).append(layer)
    return ", ".join(
        f"{text(value)} ({layer_ranges(layers)})"
        for value, layers in sorted(groups.items(), key=lambda item: item[1][0])
    )


class Nodes(Protocol):
    """The machines of a launch: a job has them, and so has a place."""

    @property
    def num_nodes(self) -> int:
        """Number of machines."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each."""


def torchrun(job: Nodes, script: Sequence[str] | str) -> str:
    """Return the command of one node: torchrun over all nodes, then `script`.

    Words are quoted, a text is taken as it is. On several nodes MASTER_ADDR, MASTER_PORT and
    NODE_RANK come from the environment.
    """
    tail = script if isinstance(script, str) else " ".join(map(shlex.quote, script))
    # one node needs no address to meet at
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
    """Return one shell command over several lines; ends in a newline."""
    return " \\\n    ".join(parts) + "\n"


# --------------------------------------------------------------------------------------------------
# How an engine runs a plan, as options of the search: to price it, and to search again.
#
# What the search takes for granted, such as sequence parallelism, an engine may do otherwise. Each
# exporter says how its engine does it; what differs from the job is priced, and the options that a
# new search needs are fields of `SearchOptions`, which become words only where they are shown.


# Parts of the spaces of engines.
SINGLE_STAGE: Part = {"max_pp_deg": 1}
ONE_DEGREE: Part = {"fine_grained_mode": False}
EVERY_MICROBATCH: Part = {"async_grad_reduce": False}
REPLICAS: Part = {"default_dp_type": "ddp", "disable_sdp": True}
SHARDED_OPTIMIZER: Part = {"default_dp_type": "zero2", "disable_sdp": True}
MODEL_GRADIENTS: Part = {"fp32_gradients": False}
"""Summed in the precision of the model."""
ZERO3 = "zero3=1,vzero3=1"

UNIFORM: SearchFields = (("fine_grained_mode", False),)
ONE_STAGE: SearchFields = (("max_pp_deg", 1),)


def different(job: Job, plan: Plan, runs: Mapping[str, bool]) -> dict[str, bool]:
    """Return the options that an engine runs otherwise than the job was priced.

    When a micro-batch is the whole step it makes no difference when gradients are reduced, nor
    in fp32 how they are.
    """
    return {
        name: value
        for name, value in runs.items()
        if getattr(job, name) != value
        and not (name == "async_grad_reduce" and plan.num_microbatches == 1)
        and not (name == "fp32_gradients" and job.precision == "fp32")
    }


def as_typed(fields: Iterable[tuple[str, Any]]) -> str:
    """Return fields of `SearchOptions` with their values as options are typed."""
    rows = {row.field: row for row in rows_of(SearchOptions)}
    return " ".join(
        word
        for field, value in fields
        for word in words_of(rows[field], written(rows[field], value))
    )


def search_words(lowered: Lowered) -> str:
    """Return what to type so that a search finds plans that an engine runs as they are priced."""
    if not lowered.search:
        return ""
    return as_typed((*lowered.search, ("memory_of", lowered.engine)))


def search_fields(
    plan: Plan, runs: Mapping[str, bool], more: Sequence[tuple[str, Any]] = ()
) -> SearchFields:
    """Return the options whose search finds plans of these degrees that lose nothing.

    more : options of the engine, which come first.
    """
    fields = list(more)
    # defaults need not be typed
    fields += [item for item in runs.items() if item[1] != getattr(SearchOptions, item[0])]
    # a nearest plan treats layers alike, so the first stands for all
    layer = plan.layers[0]
    rules = [f"tp={layer.tp}", f"vtp={plan.vocab.tp}"]
    if layer.tp > 1 and layer.ulysses:
        fields.append(("sp_space", "tp+sp"))
        rules += ["ulysses=1", "vulysses=1"]
    if layer.cp > 1:
        fields.append(("max_cp_deg", layer.cp))
        rules.append(f"cp={layer.cp}")
    if plan.vocab.cp > 1:
        rules.append(f"vcp={plan.vocab.cp}")
    if layer.zero3:
        rules += ["zero3=1", "vzero3=1"]
    else:
        # otherwise the search shards the parameters again
        fields.append(("disable_sdp", True))
        if plan.default_dp_type != "ddp":
            fields.append(("default_dp_type", plan.default_dp_type))
    return (*fields, ("pin", (",".join(rules),)))
