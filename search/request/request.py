"""Typed request of one search: parsed options, loaded input documents and filled defaults.

This module prices, searches and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autopar.command.answers import OUTPUTS
from autopar.command.dialect import own_names
from autopar.command.fields import make, option, read_values, rows_of, validate, written
from autopar.command.options import Command
from autopar.documents import catalog
from autopar.errors import DocumentError, OptionError
from autopar.limits import MOST_WORDS
from autopar.records import Record, replace
from autopar.units import GIB
from search.request.degrees import DegreeOptions, with_training_precision
from search.request.options import (
    PANELS,
    EngineChoice,
    OutputSpec,
    SearchOptions,
    Shorthands,
    StackSizes,
    with_stacks,
)
from search.request.profiles import (
    DiscoveredProfiles,
    card_shape,
    card_with_shape,
    cluster_shape,
    find_places,
    is_bare_card,
    is_measured_only,
    named_card,
)

if TYPE_CHECKING:
    from autopar.documents.plan import PlanDocument
    from autopar.rates.measured import HardwareProfile
    from autopar.rates.site import Site
    from autopar.run.model import ModelProfile, ModelSpec
    from autopar.sources import Source
    from search.questions.lengths import LengthsQuestion

# --------------------------------------------------------------------------------------------------
# Loading of model, profile and hardware, measured or estimated.


DEFAULT_HARDWARE = "a100-80gb:1x8"
"""Default hardware: the shipped set of files, or an estimate if another shape is requested."""
_SHIPPED_HARDWARE = "a100-80gb_1x8"

_IN = "Inputs"
_Value = TypeVar("_Value")
Once = Callable[[object, Callable[[], Any]], Any]
"""Cache shared by several searches: (key, function) -> cached result of the function."""
_OF_CLUSTERS = ("hardware", "num_nodes", "num_gpus_per_node", "world_size")
_OF_MODELS = (
    *("model", "num_layers", "seq_length", "hidden_size", "num_heads", "num_kv_heads"),
    *("head_dim", "ffn_hidden_size", "vocab_size", "make_vocab_size_divisible_by"),
)
"""Fields of `InputSpec` that concern only the cluster or only the model.

Cached hardware does not depend on `_OF_MODELS`; a cached model profile depends on the card but not
on `_OF_CLUSTERS`."""
_MAKE_TIMES = "Create it with `torchrun -m profiler.hardware` (sp_time_*.json)"


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """Input files and sizes as named on the command line; None is not given."""

    model: str | None = option(
        None,
        help="shipped name, repository name, config.json or model.json",
        panel=_IN,
        metavar="NAME",
        brief="name from `autopar models`, or config.json",
        most_used=True,
        parse=catalog.shipped_model,
    )
    hardware: str | None = option(
        None,
        help="CARD:NODESxGPUS (estimated), shipped name, or a folder of profiles",
        panel=_IN,
        metavar="CARD:NODESxGPUS",
        parse=catalog.spelled_hardware,
        brief="h100:8x8 (8 nodes of 8 GPUs), or a profile folder",
        most_used=True,
    )
    num_nodes: int | None = option(
        None,
        name="nodes",
        also="num-nodes",
        help="number of nodes",
        panel=_IN,
        shown="1",
        low=1,
        high=1 << 20,
    )
    num_gpus_per_node: int | None = option(
        None,
        name="gpus-per-node",
        also="num-gpus-per-node",
        help="GPUs per node",
        panel=_IN,
        shown="8",
        low=1,
        high=4096,
    )
    world_size: int | None = option(
        None,
        name="gpus",
        also="world-size",
        help="total number of GPUs",
        panel=_IN,
        low=1,
        high=1 << 24,
    )
    memory_profiling_path: str | None = option(
        None, help="memory profile of the model, or its folder", panel=_IN
    )
    time_profiling_path: str | None = option(
        None, help="computation profile of the model, or its folder", panel=_IN
    )
    allreduce_bandwidth_config_path: str | None = option(
        None, help="all-reduce bandwidths, or their folder", panel=_IN
    )
    p2p_bandwidth_config_path: str | None = option(
        None, help="point-to-point bandwidths, or folder", panel=_IN
    )
    overlap_coe_path: str | None = option(
        None, help="overlap coefficient, or its folder", panel=_IN
    )
    sp_time_path: str | None = option(
        None, help="collective times (for tp+sp), or their folder", panel=_IN
    )
    bandwidth_unit: Literal["GB/s", "MiB/ms"] | None = option(
        None, help="bandwidth unit of files without a sidecar", panel=_IN, shown="GB/s"
    )
    parameter_bytes: Literal[2, 4] | None = option(
        None, help="bytes per parameter in parameter_size", panel=_IN, shown="4"
    )
    num_layers: tuple[int, ...] | None = option(
        None, help="layers per layer type", panel=_IN, low=1, high=1 << 16
    )
    seq_length: tuple[int, ...] | None = option(
        None,
        help="tokens per sample, by layer type",
        panel=_IN,
        low=1,
        high=1 << 28,
        most_used=True,
    )
    hidden_size: tuple[int, ...] | None = option(
        None, help="hidden size, by layer type", panel=_IN, low=1, high=1 << 24
    )
    num_heads: int | None = option(None, help="attention heads", panel=_IN, low=1, high=1 << 20)
    num_kv_heads: int | None = option(
        None, help="key-value heads [in proportion to the heads]", panel=_IN, low=1, high=1 << 20
    )
    head_dim: int | None = option(
        None, help="head dimension [hidden size / heads]", panel=_IN, low=1, high=1 << 20
    )
    ffn_hidden_size: int | None = option(
        None, help="MLP width [in proportion to the hidden size]", panel=_IN, low=1, high=1 << 24
    )
    vocab_size: int | None = option(None, help="vocabulary size", panel=_IN, low=1, high=MOST_WORDS)
    make_vocab_size_divisible_by: int | None = option(
        None,
        help="multiple to which the vocabulary is padded, per vtp",
        panel=_IN,
        low=1,
        high=1 << 24,
    )
    stack: str | None = option(
        None,
        help="software stack of the estimates (`autopar stacks`)",
        panel=_IN,
        shown="torchtitan-eager",
    )
    site: str | None = option(None, help="measured cluster (`autopar sites`), or `none`", panel=_IN)
    calibration: str | None = option(
        None, help="correction factors, from autopar-verify", panel="Cost model", place=1
    )
    check_ignore: tuple[str, ...] | None = option(
        None, help="argument of a launch script without effect", panel=_IN, metavar="NAME"
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def uses_default_model(self) -> bool:
        """True if neither a model nor a profile of one is named."""
        return not (self.model or self.memory_profiling_path or self.time_profiling_path)

    @property
    def uses_default_hardware(self) -> bool:
        """True if neither hardware nor a hardware file is named."""
        return not (self.hardware or any(path for _, path in self.hardware_paths))

    @property
    def hardware_paths(self) -> tuple[tuple[str, str | None], ...]:
        """(option, path) of every file of measured bandwidths; the path is None if not given."""
        return (
            ("--allreduce-bandwidth-config-path", self.allreduce_bandwidth_config_path),
            ("--p2p-bandwidth-config-path", self.p2p_bandwidth_config_path),
            ("--overlap-coe-path", self.overlap_coe_path),
            ("--sp-time-path", self.sp_time_path),
        )


def load_inputs(
    inputs: InputSpec, options: SearchOptions
) -> tuple[ModelSpec, ModelProfile, HardwareProfile]:
    """Return (spec, profile, hardware) of a request.

    Raises InputError when an input is missing, unusable, or contradicts another; OptionError names
    the option.
    """
    return load_placed(with_places(inputs, options)[0], options)


def load_placed(
    inputs: InputSpec, options: SearchOptions, once: Once = lambda key, make: make()
) -> tuple[ModelSpec, ModelProfile, HardwareProfile]:
    """Return (spec, profile, hardware) of inputs from `with_places`; errors as `load_inputs`.

    once : cache; calls the function (second argument) once per key (first argument)
    """
    if _is_shipped(inputs, options):
        return _shipped(options)
    from autopar.rates.model import check_rates, check_threads

    of_cluster = replace(inputs, **dict.fromkeys(_OF_MODELS))
    hardware, card = once(("hardware", of_cluster), lambda: _hardware(inputs))
    if inputs.site is not None and card is None:
        raise OptionError(
            "--site needs estimated hardware, but the hardware is measured",
            remedy="Remove --site, or use --hardware CARD:NODESxGPUS",
        )
    if options.sp_space != "tp" and not options.disable_sp and hardware.world_size > 1:
        _require_all_to_all(inputs, options, hardware)
    of_model = replace(inputs, **dict.fromkeys(_OF_CLUSTERS))
    key = ("model", of_model, card, options.mixed_precision, options.sequence_parallel)
    spec, profile = once(key, lambda: _model(inputs, options, card))
    profile, hardware = _with_stack(profile, hardware, inputs, card)
    check_threads(profile, hardware)
    if card is None or inputs.time_profiling_path is not None:
        notes = check_rates(profile, spec, hardware)
        profile = replace(profile, notes=(*profile.notes, *notes))
    return spec, profile, hardware


def _with_stack(
    profile: ModelProfile, hardware: HardwareProfile, inputs: InputSpec, card: str | None
) -> tuple[ModelProfile, HardwareProfile]:
    """Return (profile, hardware) with the software stack among their sources, and how it was named.

    If measured times name a shipped stack in their sidecars, hardware of a card is estimated again
    with it. Raises OptionError if --stack names another stack than the sidecars.
    """
    from autopar import sources as known

    how = known.NAMED_BY_DEFAULT if inputs.stack is None else known.NAMED_BY_OPTION
    of_files = [] if inputs.time_profiling_path is None else [profile.sources]
    of_files += [hardware.sources] if card is None else []
    asked = None
    if inputs.stack is not None:
        from autopar.rates.stack import load_stack

        asked = load_stack(inputs.stack)
    named = [name for sources in of_files for name in known.stacks_of(sources)]
    if asked is not None and (others := [name for name in named if name != asked.name]):
        raise OptionError(
            f"--stack: {asked.name} contradicts the sidecars of the files, which name {others[0]}",
            remedy="Remove --stack",
        )
    if card is not None and of_files and asked is None:
        named = [name for name in known.stacks_of(profile.sources) if name in catalog.stack_names()]
        if len(named) == 1:
            hardware, how = _hardware(replace(inputs, stack=named[0]))[0], known.NAMED_BY_FILES

    def sources_of(sources: tuple[Source, ...], *, read: bool) -> tuple[Source, ...]:
        if not read:
            return known.with_stack_named_by(sources, how)
        if asked is None or known.stacks_of(sources):
            return sources
        return (*sources, replace(asked.source, estimated=False, notes=(known.NAMED_BY_OPTION,)))

    read = inputs.time_profiling_path is not None
    return (
        replace(profile, sources=sources_of(profile.sources, read=read)),
        replace(hardware, sources=sources_of(hardware.sources, read=card is None)),
    )


def with_places(inputs: InputSpec, options: SearchOptions) -> tuple[InputSpec, DiscoveredProfiles]:
    """Return the inputs, completed with measured files of default folders, and these folders."""
    places = find_places(
        lambda: model_spec(inputs),
        options.mixed_precision,
        card=named_card(inputs.hardware),
        has_hardware=not inputs.uses_default_hardware,
        has_profile=bool(inputs.time_profiling_path or inputs.memory_profiling_path),
        has_shape=bool(inputs.num_nodes or inputs.num_gpus_per_node or inputs.world_size),
    )
    found: dict[str, Any] = {name.replace("-", "_"): path for name, path in places.named.items()}
    if places.times is not None and inputs.uses_default_model:
        found["model"] = catalog.DEFAULT_MODEL
    return replace(inputs, **found), places


def _is_shipped(inputs: InputSpec, options: SearchOptions) -> bool:
    """Return True if the request names no inputs and the shipped files cover all its options."""
    # the defaults can be named, too: `explain` passes those that a plan file stores
    named = replace(
        inputs,
        model=None if inputs.model == catalog.DEFAULT_MODEL else inputs.model,
        hardware=None if inputs.hardware == DEFAULT_HARDWARE else inputs.hardware,
        calibration=None,  # it corrects figures of the files, it does not select files
    )
    # shipped times were measured in bf16
    return named == InputSpec() and options.mixed_precision == "bf16"


def _shipped(options: SearchOptions) -> tuple[ModelSpec, ModelProfile, HardwareProfile]:
    from autopar.documents.hardware import read_hardware_dir
    from autopar.documents.model import read_model_profile
    from autopar.documents.spec import load_spec

    spec = load_spec(catalog.DEFAULT_MODEL)
    folder = catalog.find_model(catalog.DEFAULT_MODEL).parent / "configs"
    profile = read_model_profile(
        computation=folder,
        memory=folder,
        spec=spec,
        sequence_parallel=options.sequence_parallel,
        precision=options.mixed_precision,
    )
    hardware = read_hardware_dir(
        catalog.find_hardware(_SHIPPED_HARDWARE), num_nodes=1, gpus_per_node=8
    )
    return spec, profile, hardware


def _hardware(inputs: InputSpec) -> tuple[HardwareProfile, str | None]:
    """Return (hardware, card name), None as card name of measured hardware; raises OptionError."""
    from autopar.rates.card import estimate_hardware
    from autopar.rates.stack import DEFAULT_STACK, load_stack

    name = inputs.hardware
    if inputs.uses_default_hardware:
        # times measured on another device must not be combined with a default device
        if inputs.time_profiling_path or inputs.memory_profiling_path:
            raise OptionError(
                "--hardware is missing",
                remedy=(
                    "Add --hardware CARD:NODESxGPUS such as a100-80gb:1x8, a folder of "
                    "hardware files, or --allreduce-bandwidth-config-path"
                ),
            )
        name = DEFAULT_HARDWARE
    asked = named_card(name)
    given = [option for option, path in inputs.hardware_paths if path]
    if asked is not None and given:
        raise OptionError(
            f"--hardware {asked} estimates the cluster, but {given[0]} names a measured file",
            remedy="Use --nodes and --gpus-per-node instead of CARD:NODESxGPUS",
        )
    if asked is None:
        return measured_hardware(inputs, name), None
    card, num_nodes, gpus_per_node = card_shape(
        asked, inputs.num_nodes, inputs.num_gpus_per_node, inputs.world_size
    )
    hardware = estimate_hardware(
        card,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        stack=load_stack(inputs.stack or DEFAULT_STACK),
        site=_site(inputs),
    )
    return hardware, card


def _site(inputs: InputSpec) -> Site | None:
    from autopar.rates.site import load_site

    return None if inputs.site is None else load_site(inputs.site)


def measured_hardware(inputs: InputSpec, name: str | None) -> HardwareProfile:
    """Return the hardware profile read from measured files.

    name : folder or shipped set of files; None if paths of files are given in `inputs`
    """
    from autopar.documents.hardware import hardware_file_name, read_hardware

    folder: Path | None = None
    if name is not None:
        folder = Path(name) if Path(name).is_dir() else catalog.find_hardware(name)
    given = {option: Path(path) for option, path in inputs.hardware_paths if path is not None}
    if folder is None:
        # Files that are not named are searched in the folder of the first named one.
        first = next(iter(given.values()))
        folder = first if first.is_dir() else first.parent
    num_nodes, gpus_per_node = cluster_shape(
        inputs.num_nodes, inputs.num_gpus_per_node, inputs.world_size, _shapes_of(folder, inputs)
    )
    sp_time = given.get("--sp-time-path")
    if sp_time is None:
        # collective times are optional, so they are read only if the folder contains them
        beside = folder / hardware_file_name("sp_time", num_nodes, gpus_per_node)
        sp_time = beside if beside.is_file() else None
    return read_hardware(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce=given.get("--allreduce-bandwidth-config-path", folder),
        p2p=given.get("--p2p-bandwidth-config-path", folder),
        overlap=given.get("--overlap-coe-path", folder),
        sp_time=sp_time,
        bandwidth_unit=inputs.bandwidth_unit,
    )


def _shapes_of(folder: Path, inputs: InputSpec) -> tuple[tuple[int, int], ...]:
    """Return candidate (nodes, GPUs per node) of the all-reduce files.

    A named file with a shape in its name gives the only candidate; otherwise, the files of the
    folder.
    """
    from autopar.documents.hardware import hardware_shapes, shape_of_name

    named = inputs.allreduce_bandwidth_config_path
    if named is not None and not Path(named).is_dir():
        shape = shape_of_name(Path(named).name)
        return (shape,) if shape is not None else ()
    return hardware_shapes(folder) if folder.is_dir() else ()


def _require_all_to_all(
    inputs: InputSpec, options: SearchOptions, hardware: HardwareProfile
) -> None:
    if any(operation == "all2all" for operation, _ in hardware.curves):
        return
    where = inputs.sp_time_path or "--sp-time-path is not given"
    raise OptionError(
        f"--sp-space {options.sp_space}: needs measured all-to-all times, but "
        f"there are none ({where})",
        remedy=_MAKE_TIMES,
    )


def _model(
    inputs: InputSpec, options: SearchOptions, card: str | None
) -> tuple[ModelSpec, ModelProfile]:
    from autopar.documents.model import read_model_profile, with_shipped_memory
    from autopar.rates.model import estimate_model
    from autopar.run.model import refuse_hybrid

    computation, memory = inputs.time_profiling_path, inputs.memory_profiling_path
    if (computation is None) != (memory is None):
        missing = "--time-profiling-path" if computation is None else "--memory-profiling-path"
        raise OptionError(
            f"{missing} is missing: times and memory of a profile are used together",
            remedy=f"Add {missing}",
        )
    spec = refuse_hybrid(
        model_spec(inputs),
        "the planner of per-layer plans",
        remedy="Remove --engine, or use another model",
    )
    if computation is not None and memory is not None:
        profile = read_model_profile(
            computation=Path(computation),
            memory=Path(memory),
            spec=spec,
            sequence_parallel=options.sequence_parallel,
            precision=options.mixed_precision,
            parameter_bytes=inputs.parameter_bytes,
        )
        return spec, profile
    if card is None:
        raise OptionError(
            f"--model {spec.name}: no measured profile found",
            remedy=(
                "Add --time-profiling-path and --memory-profiling-path, or "
                "--hardware CARD:NODESxGPUS to estimate"
            ),
        )
    profile = estimate_model(
        spec,
        card,
        precision=options.mixed_precision,
        sequence_parallel=options.sequence_parallel,
        stack=inputs.stack,
        site=_site(inputs),
    )
    return spec, with_shipped_memory(profile, spec, inputs.model or catalog.DEFAULT_MODEL)


def model_spec(inputs: InputSpec) -> ModelSpec:
    """Return the architecture that the options describe; errors as `load_inputs`."""
    from autopar.documents.spec import bare_spec, load_spec, resized

    name = inputs.model or (catalog.DEFAULT_MODEL if inputs.uses_default_model else None)
    widths = {
        key: getattr(inputs, key)
        for key in ("num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
    }
    sized = None not in (inputs.num_layers, inputs.seq_length, inputs.hidden_size)
    # Galvatron's files are in models/NAME/configs and need the sizes from options
    if name is not None and not (sized and is_measured_only(name)):
        spec = load_spec(
            name,
            num_layers=inputs.num_layers,
            seq_length=inputs.seq_length,
            hidden_size=inputs.hidden_size,
            **widths,
        )
    else:
        sizes = {
            "--num-layers": inputs.num_layers,
            "--seq-length": inputs.seq_length,
            "--hidden-size": inputs.hidden_size,
        }
        missing = [option for option, value in sizes.items() if value is None]
        if missing:
            raise OptionError(
                f"{missing[0]} is missing, also in the files", remedy="Add it, or --model"
            )
        spec = bare_spec(
            num_layers=inputs.num_layers or (),
            seq_length=inputs.seq_length or (),
            hidden_size=inputs.hidden_size or (),
            name=name or "custom",
        )
        layers = tuple(resized(layer, **widths) for layer in spec.layers)
        spec = replace(spec, layers=layers)
    changes: dict[str, int] = {}
    if inputs.vocab_size is not None:
        changes["vocab_size"] = inputs.vocab_size
    if inputs.make_vocab_size_divisible_by is not None:
        changes["make_vocab_size_divisible_by"] = inputs.make_vocab_size_divisible_by
    return replace(spec, **changes) if changes else spec  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Options stored in plan files.


def stored_request(
    path: str,
    document: PlanDocument,
    typed: Collection[str] = (),
    notice: Callable[[str], None] | None = None,
) -> dict[str, object]:
    """Return the options stored in a plan file written by autopar, empty for other files.

    Inputs that are not found below the current folder are searched in the folder of the plan file.

    typed : options given on the command line, which replace stored ones.
    notice : receives a sentence on each input that was found in the folder of the plan file.
    """
    known = {row.name: row.kind for row in ROWS}
    kinds = {"flag": bool, "switch": bool, "texts": list}
    # files of earlier releases contain earlier option names
    document = replace(document, request=own_names(document.request, ROWS))
    for name, value in document.request.items():
        if name not in known or not isinstance(value, kinds.get(known[name], str)):
            raise DocumentError(
                path,
                f"the request contains the option {name!r} with the unusable value {value!r:.60}",
                key="request",
                remedy="Write the plan again with autopar-search",
            )
    return located_request(path, document.request, typed, notice)


def located_request(
    path: Path | str,
    request: Mapping[str, _Value],
    typed: Collection[str] = (),
    notice: Callable[[str], None] | None = None,
) -> dict[str, _Value | str]:
    """Return stored options with paths relative to the current folder.

    Parameters are those of `stored_request`.

    Raises DocumentError if an input file is not on this machine, or an output file is named.
    """
    for name in OUTPUTS & request.keys():  # reading a plan must not write
        raise DocumentError(path, f"{name!r} writes a file", key="request", remedy="Remove it")
    found, notes = catalog.located_options(request, path, typed)
    catalog.require_inputs(found, path, typed)
    if notice is not None:
        for note in notes:
            notice(note)
    return found


# --------------------------------------------------------------------------------------------------
# Defaults derived from the inputs, for options that are not given.


_NOMINAL = 1.02
"""Largest ratio of a card's nominal memory (rounded up) to its actual memory."""
BATCH_OPTIONS = frozenset({"min-bsz", "max-bsz", "global-batch-size"})
"""Options that set the range of global batches to search."""


def check_memory(options: SearchOptions, given: Collection[str], hardware: HardwareProfile) -> None:
    """Raise OptionError if the user requests more memory than a device has."""
    asked, memory = options.memory_constraint_bytes, hardware.memory_bytes
    # card names contain rounded sizes: an 80GB card reports 79.65 GiB
    if "memory-constraint" in given and memory is not None and asked > _NOMINAL * memory:
        raise OptionError(
            f"--memory-constraint: {asked / GIB:.4g} GiB is more than the {memory / GIB:.4g} GiB "
            f"of {hardware.name}",
            remedy="Remove it to use all of it",
        )


def fill_options(
    options: SearchOptions,
    given: Collection[str],
    profile: ModelProfile,
    hardware: HardwareProfile,
) -> tuple[SearchOptions, tuple[str, ...]]:
    """Return the options with defaults derived from the inputs, and one line per default used.

    given : names of the options that the user gave, with hyphens; they are never changed.
    """
    lines = []
    if "memory-constraint" not in given:
        memory = hardware.memory_bytes
        if memory is not None:
            options = replace(options, memory_constraint_bytes=float(memory))
        why = "the GPU's memory is unknown" if memory is None else f"all memory of {hardware.name}"
        lines.append(f"--memory-constraint {options.memory_constraint_bytes / GIB:.4g} ({why})")
    if not BATCH_OPTIONS & set(given):
        lines.append(
            f"--global-batch-size {options.max_bsz} (one global batch; use "
            "--min-bsz and --max-bsz for a range)"
        )
    if "default-dp-type" not in given:
        lines.append(
            f"--default-dp-type {options.default_dp_type} (`zero1` and `zero2` shard optimizer "
            "states, `any` tries all)"
        )
    if not {"profile-mode", "time-profile-mode"} & set(given):
        # Estimated times exist for several batches and contain a launch cost, which the
        # static default, a time proportional to the batch, would spread over the samples.
        several = profile.estimated and _several_batches(profile)
        if several:
            options = replace(options, time_profile_mode="batch")
        why = "a launch cost plus a cost per sample" if several else "time proportional to batch"
        lines.append(f"--time-profile-mode {options.time_profile_mode} ({why})")
    return options, tuple(lines)


def _several_batches(profile: ModelProfile) -> bool:
    """Return True if every time in the profile was measured at more than one batch size."""
    batches: dict[tuple[object, ...], set[int]] = {}
    for k, layer in enumerate(profile.layers):
        for point in layer.times:
            batches.setdefault((k, point.seq_length), set()).add(point.batch)
    for other in profile.other_times:
        # separating a launch cost needs two batches at every length
        batches.setdefault(other.seq_lengths, set()).add(other.batch)
    return bool(batches) and min(map(len, batches.values())) > 1


# --------------------------------------------------------------------------------------------------
# Typed request of all options of a search.


FILLS = (InputSpec, SearchOptions, DegreeOptions, Shorthands, StackSizes, OutputSpec)
ROWS = Command(name="", intro="", fills=FILLS, panels=PANELS).rows
"""Every option of a search, in the order of the help and of plan files."""


class Request(Record):
    """Complete command line: inputs, search options, output options."""

    inputs: InputSpec
    options: SearchOptions
    output: OutputSpec
    given: Mapping[str, object]
    """Option name -> text as given, for all options that affect the result.

    Plan files store it, so that a search can be repeated."""
    engine: EngineChoice | None = None
    """Engine of the searched plans, see `search.planning.layered.parts`; None: not given."""
    degrees: DegreeOptions = DegreeOptions()
    found: tuple[str, ...] = ()
    """Default folders used for inputs that were not named, one line each, for the list of
    defaults."""
    samples: LengthsQuestion | None = None
    """Lengths of the samples and their batching; None: every sample fills its sequence."""


# Options that affect only output or speed are not stored; options that the engine implies are
# stored in place of the engine.
_NOT_KEPT = frozenset(
    {"json", "html", "trace", "output-config-path", "evaluate", "frontier", "time-limit", "engine"}
    | {"plot", "verbose", "price", "goal", "tokens-per-s", "use", "gap"}
)


def build_request(raw: Mapping[str, object]) -> Request:
    """Return the request of a parsed command line.

    raw : option name (hyphens) -> text, bool, or list of texts; None or absent is not given. Names
        of earlier releases are accepted.

    Raises OptionError when a value is unusable or two options contradict each other.
    """
    raw = with_stacks(with_training_precision(own_names(raw, ROWS)))
    values = read_values(ROWS, raw)
    hardware = values.get("hardware")
    if hardware is not None and is_bare_card(hardware):
        shape = card_with_shape(
            hardware, values.get("nodes"), values.get("gpus-per-node"), values.get("gpus")
        )
        values["hardware"] = shape
        raw = {**raw, "hardware": shape}
    kept = {name: raw[name] for name in values if name not in _NOT_KEPT}
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in kept.items()}
    mode = values.get("profile-mode")
    if mode is not None:
        values.setdefault("time-profile-mode", mode)
        # Memory has no batch mode: it is per sample already.
        values.setdefault("memory-profile-mode", "sequence" if mode == "sequence" else "static")
    from search.planning.space import check_batches, parse_rules

    # before the dataclass checks the range: a missing end of the range takes the other end
    check_batches(values)
    if {"reserve", "oom-risk"} <= values.keys():
        raise OptionError(
            "--oom-risk cannot be combined with --reserve, which sets the reserved memory"
        )
    if values.get("enable-cp") and values.get("disable-cp"):
        raise OptionError("--enable-cp cannot be combined with --disable-cp", remedy="Remove one")
    options = make(SearchOptions, values)
    # check here, before any input is read
    parse_rules(options.pin, options.forbid)
    if values.get("site") == "none":
        values["site"] = None
    if values.get("output-config-path") == "none":
        values["output-config-path"] = None
    return Request(
        inputs=make(InputSpec, values),
        options=options,
        output=make(OutputSpec, values),
        given=given,
        engine=values.get("engine"),
        degrees=make(DegreeOptions, values),
    )


def extended(request: Request, changes: Mapping[str, Any]) -> Request:
    """Return a request with additional options, as if the user had given them.

    Given options keep their values, except for lists such as `pin`, which are extended.

    changes : field of `InputSpec` or `SearchOptions` -> value
    """
    given = dict(request.given)
    parts: dict[str, Any] = {"inputs": request.inputs, "options": request.options}
    for part, asked in parts.items():
        chosen = {}
        for row in rows_of(type(asked)):
            if row.field not in changes or (row.kind != "texts" and row.name in given):
                continue
            more = changes[row.field]
            value = (*getattr(asked, row.field), *more) if row.kind == "texts" else more
            chosen[row.field] = value
            given[row.name] = written(row, value)
        parts[part] = replace(asked, **chosen)
    # in the order of the help, as in plan files
    kept = {row.name: given[row.name] for row in ROWS if row.name in given}
    return replace(request, **parts, given=kept)
