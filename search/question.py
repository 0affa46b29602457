"""One question with its inputs loaded: what the commands share between options and planner."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.documents.calibration import read_calibration
from autopar.documents.plan import read_strategy
from autopar.errors import DocumentError, OptionError
from autopar.hardware import HardwareProfile
from autopar.model import ModelProfile, ModelSpec
from autopar.units import GIB
from search.options import SearchOptions
from search.request import DEFAULT_HARDWARE, DEFAULT_MODEL, InputSpec, load_inputs

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.sources import Source
    from search.planner.planner import Planner
    from search.planner.result import Prediction

__all__ = [
    "Session",
    "evaluate_file",
    "fill_options",
    "open_documents",
    "open_session",
    "read_plan_for",
    "search_options",
]


# --------------------------------------------------------------------------------------------------
# Prices a plan or strategy file of anyone: legal or not, within the budget or over it.


def read_plan_for(source: Path | str | Mapping[str, object], session: Session) -> Plan:
    """Return the plan in a file, which must describe the GPUs and layers of the session.

    Raises
    ------
    DocumentError
        When it does not, because then there are no profiles to price it with.
    """
    world, spec = session.hardware.world_size, session.spec
    where = "plan" if isinstance(source, Mapping) else source
    plan = read_strategy(source, world_size=world)
    if plan.world_size != world:
        raise DocumentError(
            where,
            f"is {plan.world_size} while the hardware has {world} GPUs",
            key="world_size",
            remedy="give the plan's --hardware, or --num-nodes and --num-gpus-per-node",
        )
    if len(plan.layers) != spec.num_layers:
        raise DocumentError(
            where,
            f"describes {len(plan.layers)} layers while {spec.name} has {spec.num_layers}",
            key="tp_sizes_enc",
            remedy="give the plan's --model or --num-layers",
        )
    return plan


def evaluate_file(
    source: Path | str | Mapping[str, object], session: Session
) -> tuple[Plan, Prediction]:
    """Return the plan in a file and its prediction, with `legal`, `fits` and the arithmetic."""
    plan = read_plan_for(source, session)
    return plan, session.planner.evaluate(plan)


# --------------------------------------------------------------------------------------------------


_BATCH_OPTIONS = frozenset({"min-bsz", "max-bsz", "settle-bsz"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """Loaded inputs, the options, and the planner built on them."""

    spec: ModelSpec
    profile: ModelProfile
    hardware: HardwareProfile
    options: SearchOptions
    planner: Planner
    notices: tuple[str, ...] = ()
    """What was not named and what stands in for it, for stderr."""
    defaults: tuple[str, ...] = ()
    """Options that were not given, with the value used and why."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Option name -> name of the shipped input that stands in for one that was not given."""

    @property
    def title(self) -> str:
        """Model and cluster in one line."""
        return (
            f"{self.spec.name} ({self.spec.num_layers} layers) on {self.hardware.name}, "
            f"{self.hardware.num_nodes} x {self.hardware.gpus_per_node} GPUs"
        )

    @property
    def estimated(self) -> bool:
        """True when some input was not measured."""
        return self.hardware.estimated or self.profile.estimated

    @property
    def synthetic(self) -> bool:
        """True when some input exercises the code and describes no machine."""
        return self.hardware.synthetic or self.profile.synthetic

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every input file."""
        calibration = self.options.calibration
        extra = () if calibration is None or calibration.source is None else (calibration.source,)
        return self.hardware.sources + self.profile.sources + extra

    @property
    def calibrated(self) -> tuple[str, ...]:
        """What a calibration changes, as one of the lines of `defaults used`."""
        calibration = self.options.calibration
        return () if calibration is None else (calibration.sentence,)

    @property
    def notes(self) -> tuple[str, ...]:
        """What readers derived, skipped or scaled; that an input is estimated stands elsewhere."""
        from search.cost.calibrated import calibration_doubts

        doubts = calibration_doubts(self.spec, self.profile, self.hardware, self.options)
        notes = (*self.hardware.notes, *self.profile.notes, *doubts)
        return tuple(note for note in notes if not note.startswith("estimated: "))

    def rebuilt(
        self,
        *,
        hardware: HardwareProfile | None = None,
        options: SearchOptions | None = None,
    ) -> Planner:
        """Return a planner that differs in hardware or options."""
        from search.planner.planner import Planner

        return Planner.from_documents(
            self.spec, self.profile, hardware or self.hardware, options or self.options
        )


def open_session(inputs: InputSpec, options: SearchOptions, given: Collection[str] = ()) -> Session:
    """Return the session of a request; errors as `load_inputs`.

    `given` are the names of the options that somebody typed; the others may follow the inputs.
    """
    spec, profile, hardware = load_inputs(inputs, options)
    options, defaults = fill_options(options, given, profile, hardware)
    if inputs.calibration is not None:
        from autopar.documents.calibration import read_calibration

        calibration = read_calibration(inputs.calibration)
        options = dataclasses.replace(options, calibration=calibration)

    from search.cost.calibrated import calibration_doubts
    from search.planner.planner import Planner

    unnamed = (
        (inputs.uses_default_model, "--model", DEFAULT_MODEL, "times estimated"),
        (inputs.uses_default_hardware, "--hardware", DEFAULT_HARDWARE, "estimated"),
    )
    notices = [
        f"no {option} given, planning for the shipped {name} ({what})"
        for absent, option, name, what in unnamed
        if absent
    ]
    if not _BATCH_OPTIONS & set(given) and hardware.world_size > options.max_bsz:
        notices.append(
            f"no batch size given, planning for a global batch of {options.max_bsz}, fewer samples "
            f"than the {hardware.world_size} GPUs; give --settle-bsz, or --min-bsz and --max-bsz"
        )
    notices += calibration_doubts(spec, profile, hardware, options)
    return Session(
        spec=spec,
        profile=profile,
        hardware=hardware,
        options=options,
        planner=Planner.from_documents(spec, profile, hardware, options),
        notices=tuple(notices),
        defaults=defaults,
        named={option.removeprefix("--"): name for absent, option, name, _ in unnamed if absent},
    )


def fill_options(
    options: SearchOptions,
    given: Collection[str],
    profile: ModelProfile,
    hardware: HardwareProfile,
) -> tuple[SearchOptions, tuple[str, ...]]:
    """Return the options with defaults that the inputs suggest, and one line per default used.

    Parameters
    ----------
    given : names of the options that somebody chose, with hyphens; they are never changed.
    """
    lines = []
    if "memory-constraint" not in given:
        memory = hardware.memory_bytes
        if memory is not None:
            options = dataclasses.replace(options, memory_constraint_bytes=float(memory))
        why = "the GPU's memory is unknown" if memory is None else f"all memory of {hardware.name}"
        lines.append(f"--memory-constraint {options.memory_constraint_bytes / GIB:.4g} ({why})")
    if not _BATCH_OPTIONS & set(given):
        lines.append(
            f"--settle-bsz {options.max_bsz} (one global batch; --min-bsz and --max-bsz let the "
            "planner choose)"
        )
    if "default-dp-type" not in given:
        lines.append(
            f"--default-dp-type {options.default_dp_type} (`zero2` shards optimizer states, "
            "`any` tries both)"
        )
    if not {"profile-mode", "time-profile-mode"} & set(given):
        # Estimated times exist for several batches and contain a launch cost, which the
        # documented default, a time proportional to the batch, would spread over the samples.
        several = profile.estimated and _several_batches(profile)
        if several:
            options = dataclasses.replace(options, time_profile_mode="batch")
        why = "a launch cost plus a cost per sample" if several else "time proportional to batch"
        lines.append(f"--time-profile-mode {options.time_profile_mode} ({why})")
    return options, tuple(lines)


def _several_batches(profile: ModelProfile) -> bool:
    """Return whether every time in the profile was taken at more than one batch size."""
    batches: dict[tuple[object, ...], set[int]] = {}
    for k, layer in enumerate(profile.layers):
        for point in layer.times:
            batches.setdefault((k, point.seq_length), set()).add(point.batch)
    for other in profile.other_times:
        batches.setdefault(other.seq_lengths, set()).add(other.batch)
    return bool(batches) and min(map(len, batches.values())) > 1


# --------------------------------------------------------------------------------------------------
# Names, documents and keyword options of the Python interface -> what a planner works on.


_GIB_KEYS = {"memory_constraint_gib": "memory_constraint_bytes", "context_gib": "context_bytes"}
_TUPLES = ("pin", "forbid")


def search_options(options: Mapping[str, Any]) -> SearchOptions:
    """Return the options of keyword arguments.

    Fields of `SearchOptions`, and `memory_constraint_gib` and `context_gib` in GiB; one rule of
    `pin` or `forbid` may be given as a string, `calibration` as the path of its file.

    Raises
    ------
    OptionError : a name is unknown (with the nearest known one).
    """
    known = {field.name for field in dataclasses.fields(SearchOptions)}
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        key = _GIB_KEYS.get(name, name)
        if key not in known:
            near = difflib.get_close_matches(name, [*known, *_GIB_KEYS], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "see search.SearchOptions"
            raise OptionError(f"unknown option {name!r}; {hint}")
        if name in _GIB_KEYS:
            value = float(value) * GIB
        if key in _TUPLES:
            value = (value,) if isinstance(value, str) else tuple(value)
        if key == "pp_division" and value is not None:
            value = tuple(value)
        if key == "calibration" and isinstance(value, str | Path):
            value = read_calibration(value)
        chosen[key] = value
    return SearchOptions(**chosen)


def open_documents(
    model: str | tuple[ModelSpec, ModelProfile],
    hardware: str | HardwareProfile,
    options: Mapping[str, Any],
) -> tuple[ModelSpec, ModelProfile, HardwareProfile, SearchOptions]:
    """Return the documents behind names, and the options with the defaults that they suggest.

    Parameters
    ----------
    model, hardware : what `--model` and `--hardware` take, or the documents themselves.
    options : see `search_options`.

    Raises
    ------
    InputError : an input or option is unusable.
    """
    chosen = search_options(options)
    if isinstance(model, str) or isinstance(hardware, str):
        inputs = InputSpec(
            model=model if isinstance(model, str) else None,
            hardware=hardware if isinstance(hardware, str) else None,
        )
        spec, profile, cluster = load_inputs(inputs, chosen)
    if not isinstance(model, str):
        spec, profile = model
    if not isinstance(hardware, str):
        cluster = hardware
    given = {name.removesuffix("_bytes").removesuffix("_gib").replace("_", "-") for name in options}
    chosen, _ = fill_options(chosen, given, profile, cluster)
    return spec, profile, cluster, chosen
