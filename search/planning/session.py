"""Session: a search request with its loaded model, profiles, hardware and planner.

Options and inputs are read in `search.request.request`; step time and memory are computed in
`search.planning.cost`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import field

from autopar.command.fields import rows_of, written
from autopar.documents.catalog import DEFAULT_MODEL
from autopar.documents.spec import length_key
from autopar.errors import DocumentError, InputError, VariantError
from autopar.rates.measured import HardwareProfile
from autopar.records import Record, replace
from autopar.run.model import ModelProfile, ModelSpec
from search.request.options import SPACE_PANEL, SearchOptions, widest
from search.request.profiles import named_card
from search.request.request import (
    BATCH_OPTIONS,
    DEFAULT_HARDWARE,
    InputSpec,
    Once,
    check_memory,
    fill_options,
    load_placed,
    with_places,
)

if TYPE_CHECKING:
    from autopar.answer import Answer, Priced, WarningKind
    from autopar.documents.plan import HardwareEntry, PlanDocument
    from autopar.rates.card import Card
    from autopar.run.plan import Plan, Prediction
    from autopar.sources import Source
    from autopar.training.throughput import Throughput
    from search.planning.layered.planner import Planner
    from search.planning.layered.prediction import SearchResult

# --------------------------------------------------------------------------------------------------
# Pricing of plan or strategy files of any origin: also illegal or too large ones.


def read_plan_for(
    source: Path | str | Mapping[str, object] | PlanDocument,
    session: Session,
    *,
    path: Path | str = "plan",
) -> Plan:
    """Return the plan in a plan or strategy file.

    path : file name in errors if `source` is a parsed document.

    Raises DocumentError if the plan has other numbers of GPUs or layers than the profiles of the
    session, or settings that the planner does not support.
    """
    from autopar.documents.plan import read_strategy  # only plan files need it

    world, spec = session.hardware.world_size, session.spec
    where = source if isinstance(source, Path | str) else path
    plan = read_strategy(source, world_size=world, num_layers=spec.num_layers, path=path)
    if plan.world_size != world:
        own = _own_file(where)
        raise DocumentError(
            where,
            f"the value is {plan.world_size}, but the hardware has {world} GPUs",
            key="world_size",
            remedy=f"Add {own}, which contains model and hardware"
            if own
            else "Use the plan's --hardware, or --nodes and --gpus-per-node",
        )
    if len(plan.layers) != spec.num_layers:
        raise DocumentError(
            where,
            f"the list has {len(plan.layers)} layers, but {spec.name} has {spec.num_layers}",
            key="tp_sizes_enc",
            remedy="Use the plan's --model or --num-layers",
        )
    check_known(plan, where)
    return plan


def _own_file(strategy: Path | str) -> Path | None:
    """Return autopar's plan file next to its strategy file, None if there is none."""
    path = Path(strategy)
    own = path.with_name(f"autopar_plan_{path.name.removeprefix('galvatron_config_')}")
    return own if own.is_file() else None


def check_known(plan: Plan, where: Path | str) -> None:
    """Raise DocumentError if a plan has settings that planner and exports do not support."""
    from search.planning.layered.prediction import unpriced  # only plan files need it

    unknown = unpriced(plan)
    if unknown:
        raise DocumentError(
            where,
            f"the plan has {', '.join(unknown)}, which the planner neither prices nor exports",
            key="plan",
            remedy="Use a plan without it, or run this one with profiler.plan",
        )


def evaluate_file(
    source: Path | str | Mapping[str, object] | PlanDocument,
    session: Session,
    *,
    path: Path | str = "plan",
) -> tuple[Plan, Prediction]:
    """Return (plan in a file, its prediction); the plan may be illegal or too large.

    path : file name in errors if `source` is a parsed document.

    Raises as `read_plan_for`.
    """
    plan = read_plan_for(source, session, path=path)
    return plan, session.planner.evaluate(plan)


# --------------------------------------------------------------------------------------------------
# Sessions: requests with loaded inputs.


class Session(Record, eq=False):
    """Loaded inputs, the options, and the planner built on them."""

    spec: ModelSpec
    profile: ModelProfile
    hardware: HardwareProfile
    options: SearchOptions
    planner: Planner
    notices: tuple[str, ...] = ()
    """Messages for stderr on default inputs that replace options the user did not give."""
    defaults: tuple[str, ...] = ()
    """Options that the user did not give, with the value used and why."""
    named: Mapping[str, object] = field(default_factory=dict)
    """Option name -> shipped input, folder or value used for an option that was not given.

    Defaults that do not depend on files are not included."""

    card: Card | None = None
    """Card of the cluster; None if measured files describe it."""

    @property
    def title(self) -> str:
        """Model and cluster in one line."""
        return (
            f"{self.spec.name} ({self.spec.num_layers} layers) on {self.hardware.name}, "
            f"{self.hardware.num_nodes} x {self.hardware.gpus_per_node} GPUs"
        )

    @property
    def cluster(self) -> HardwareEntry:
        """Cluster in the format of a plan file."""
        from autopar.documents.plan import HardwareEntry  # only plan files need it

        return HardwareEntry(
            card=self.hardware.name if self.card is None else self.card.name,
            num_nodes=self.hardware.num_nodes,
            num_gpus_per_node=self.hardware.gpus_per_node,
        )

    @property
    def estimated(self) -> bool:
        """True if some input was not measured."""
        return self.hardware.estimated or self.profile.estimated

    @property
    def synthetic(self) -> bool:
        """True if some input is synthetic: made for tests, without a real machine."""
        return self.hardware.synthetic or self.profile.synthetic

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of all input files."""
        calibration = self.options.calibration
        extra = () if calibration is None or calibration.source is None else (calibration.source,)
        # several files may name the same software stack
        return tuple(dict.fromkeys(self.hardware.sources + self.profile.sources + extra))

    @property
    def tokens_per_sample(self) -> int:
        """Tokens per sample; for encoder-decoder models encoder plus decoder length."""
        lengths: dict[bool, int] = {}
        for layer in self.spec.layers:
            longest = lengths.get(layer.cross_attention, 0)
            lengths[layer.cross_attention] = max(longest, layer.seq_length)
        return sum(lengths.values())

    def throughput(self, plan: Plan, prediction: Prediction) -> Throughput | None:
        """Return the throughput of a plan; None if its step time is infinite or 0.

        The peak FLOP/s, and with it MFU, is set only for a known card and 16-bit precision: fp32
        GEMMs may run in TF32, which has another peak.
        """
        from autopar.training.throughput import Throughput, least_step_s, spec_flop

        if not math.isfinite(prediction.step_time_s) or prediction.step_time_s <= 0:
            return None
        flop = again = peak = None
        # specs built from table files lack some sizes
        with contextlib.suppress(InputError):
            flop = plan.global_batch * spec_flop(self.spec)
            twice = [strategy.checkpoint for strategy in plan.layers]
            again = plan.global_batch * spec_flop(self.spec, twice)
        precision = self.options.mixed_precision
        if self.card is not None and precision != "fp32":
            peak = self.card.peak(precision)
        interval = prediction.step_time_interval_s
        if interval is not None:
            fast_s, slow_s = interval
            interval = max(fast_s, least_step_s(again, plan.world_size, peak)), slow_s
        return Throughput(
            step_s=prediction.step_time_s,
            interval_s=interval,
            gpus=plan.world_size,
            tokens=plan.global_batch * self.tokens_per_sample,
            model_flop=flop,
            hardware_flop=again,
            peak_flop_per_s=peak,
            peak_precision=precision,
        )

    def priced(self, plan: Plan, prediction: Prediction) -> Priced:
        """Return a plan with its price as the record that all reports print."""
        from search.planning.layered.summary import priced_of

        found = self.throughput(plan, prediction)
        return priced_of(plan, prediction, found, self.sources, estimated=self.estimated)

    @property
    def warnings(self) -> tuple[tuple[WarningKind, str], ...]:
        """Messages on inputs that were not measured: (kind, line)."""
        from search.planning.layered.summary import warnings_of

        return warnings_of(self.sources, estimated=self.estimated, synthetic=self.synthetic)

    def summary(
        self,
        plan: Plan,
        prediction: Prediction,
        assumed: Sequence[str],
        gpu_hour_price: float | None,
    ) -> Answer:
        """Return the record that reports print for a given plan.

        assumed : defaults used, one line each.
        gpu_hour_price : price of one GPU-hour; None: no costs are reported.
        """
        from autopar.answer import Answer

        return Answer(
            title=self.title,
            warnings=self.warnings,
            best=self.priced(plan, prediction),
            gpu_hour_price=gpu_hour_price,
            assumed=tuple(assumed),
            notes=self.notes,
        )

    @property
    def calibrated(self) -> tuple[str, ...]:
        """Effect of the calibration, as a line of `defaults used`; empty without one."""
        calibration = self.options.calibration
        return () if calibration is None else (calibration.sentence,)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on input values that were derived, skipped or scaled, and calibration doubts.

        Notes on estimated values are not included; `warnings` reports them.
        """
        from search.planning.cost.calibrated import calibration_doubts

        doubts = calibration_doubts(self.spec, self.profile, self.hardware, self.options)
        notes = (*self.hardware.notes, *self.profile.notes, *doubts)
        return tuple(note for note in notes if not note.startswith("estimated: "))

    def solve(self) -> SearchResult:
        """Return the fastest plan and at most `--top` alternatives with other degrees.

        Plans with equal pipeline stages and layer degrees form a family, even if embedding, head
        or ZeRO stage differ. Each alternative is the fastest plan of another family.
        """
        from search.planning.layered.planner import solve_by_family

        return solve_by_family(self.planner, self.options.top)

    def rebuilt(
        self,
        *,
        hardware: HardwareProfile | None = None,
        options: SearchOptions | None = None,
    ) -> Planner:
        """Return a planner with other hardware or options."""
        from search.planning.layered.planner import Planner

        return Planner.from_documents(
            self.spec, self.profile, hardware or self.hardware, options or self.options
        )


# The length of config.json is not capped at 4096 or 8192: `profile-model` measures the full length,
# so a plan for another length would be wrong without notice. A message reports the length instead.
def _unsaid_length(inputs: InputSpec, spec: ModelSpec) -> list[str]:
    """Return a message on the sequence length of config.json, if `--seq-length` is not given."""
    if inputs.model is None or inputs.seq_length is not None:
        return []
    key = length_key(inputs.model)
    tokens = spec.layers[0].seq_length
    return [] if key is None else [f"--seq-length not given; using the {tokens} tokens of {key}"]


def _without_effect(inputs: InputSpec, hardware: HardwareProfile) -> list[str]:
    """Return one sentence for each given option that has no effect because no file is read."""
    found = []
    if inputs.parameter_bytes is not None and inputs.memory_profiling_path is None:
        found.append("--parameter-bytes has no effect without --memory-profiling-path")
    if inputs.bandwidth_unit is not None and all(s.estimated for s in hardware.sources):
        found.append(f"--bandwidth-unit has no effect: {hardware.name} is estimated")
    return found


def _loaded(
    inputs: InputSpec, options: SearchOptions, given: Collection[str], once: Once
) -> tuple[SearchOptions, tuple[str, ...], tuple[ModelSpec, ModelProfile, HardwareProfile]]:
    """Return (options, line on sequence parallelism, inputs); the line is present if it changed.

    Memory files of PaddleNLP and of older releases have no tables with sequence parallelism. It is
    switched off for such files. Raises VariantError if the user gave `--sequence-parallel`.
    """
    try:
        return options, (), _placed(inputs, options, once)
    except VariantError as error:
        if "sequence-parallel" in given or not options.sequence_parallel:
            raise
        changed = replace(options, sequence_parallel=False)
        line = f"--no-sequence-parallel ({Path(error.path).name} was measured without it)"
        try:
            return changed, (line,), _placed(inputs, changed, once)
        except InputError:
            raise error from None  # tables without sequence parallelism are missing, too


def _placed(
    inputs: InputSpec, options: SearchOptions, once: Once
) -> tuple[ModelSpec, ModelProfile, HardwareProfile]:
    """Return (spec, profile, hardware); without a memory file, memory is that of `--memory-of`."""
    spec, profile, hardware = load_placed(inputs, options, once)
    if options.memory_of is not None and inputs.memory_profiling_path is None:
        from search.planning.cost.engine_memory import with_memory_of

        card = _card(inputs)
        gpu = hardware.name if card is None else card.gpu
        profile = with_memory_of(options.memory_of, profile, spec, gpu=gpu)
    return spec, profile, hardware


def _card(inputs: InputSpec) -> Card | None:
    """Return the card of a cluster; None if measured files describe it."""
    from autopar.rates.card import load_card, parse_hardware

    named = DEFAULT_HARDWARE if inputs.uses_default_hardware else named_card(inputs.hardware)
    return None if named is None else load_card(parse_hardware(named)[0])


def open_session(
    inputs: InputSpec,
    options: SearchOptions,
    given: Collection[str] = (),
    *,
    has_plan: bool = False,
    once: Once = lambda key, make: make(),
) -> Session:
    """Return the session of a request, with all inputs loaded; raises as `load_inputs`.

    given : names of the options that the user gave; other options may be set from the inputs.
    has_plan : True to evaluate a given plan; the memory constraint may then exceed device memory.

    once : function (key, make) that caches inputs of several requests, as in `load_placed`.
    """
    given = {*given, "global-batch-size"} if has_plan else given
    asked = inputs
    inputs, places = with_places(asked, options)
    options, variant, (spec, profile, hardware) = _loaded(inputs, options, given, once)
    # a plan may be priced for more memory than a device has, to report the missing memory
    if not has_plan:
        check_memory(options, given, hardware)
    options, defaults = fill_options(options, given, profile, hardware)
    if inputs.calibration is not None:
        from autopar.documents.calibration import read_calibration

        calibration = read_calibration(inputs.calibration)
        options = replace(options, calibration=calibration)

    from search.planning.cost.calibrated import calibration_doubts
    from search.planning.layered.planner import Planner

    unnamed = (
        (
            asked.uses_default_model,
            "--model",
            DEFAULT_MODEL,
            "times estimated" if places.times is None else f"times of {places.times}",
        ),
        (inputs.uses_default_hardware, "--hardware", DEFAULT_HARDWARE, "estimated"),
    )
    notices = [
        f"{option} not given; using the shipped {name} ({what})"
        for absent, option, name, what in unnamed
        if absent
    ]
    notices += places.notices
    named = {option.removeprefix("--"): name for absent, option, name, _ in unnamed if absent}
    if not BATCH_OPTIONS & set(given) and hardware.world_size > options.max_bsz:
        notices.append(
            f"--global-batch-size not given; using {options.max_bsz}, fewer "
            f"samples than the {hardware.world_size} GPUs. Add it, or --min-bsz "
            "and --max-bsz"
        )
    notices += _unsaid_length(inputs, spec)
    notices += _without_effect(inputs, hardware)
    notices += calibration_doubts(spec, profile, hardware, options)
    return Session(
        spec=spec,
        profile=profile,
        hardware=hardware,
        options=options,
        planner=Planner.from_documents(spec, profile, hardware, options),
        card=_card(inputs),
        notices=tuple(notices),
        defaults=(*places.defaults, *variant, *defaults),
        named={
            **named,
            **places.named,
            **({"sequence-parallel": options.sequence_parallel} if variant else {}),
        },
    )


# --------------------------------------------------------------------------------------------------
# Comparison with plans that obey an additional rule.


class ConstrainedResult(Record, eq=False):
    """Best plan that obeys one additional rule."""

    result: SearchResult | None
    """Search result; None if no plan obeys the rule even with fewer options."""
    reason: str = ""
    """Reason why no plan obeys the rule; empty if some do."""
    left_out: tuple[str, ...] = ()
    """Options of the request that contradict the rule and were ignored for the result."""


def ask_why_not(session: Session, rule: str, baseline: SearchResult) -> ConstrainedResult:
    """Return the best plan that obeys one additional pin, at the global batch of `baseline`.

    Options that contradict the rule are ignored and reported: first pins of the same key, then one
    option that restricts the search space, then all such options together.

    rule : pin such as `tp=8`.

    Raises OptionError if it does not follow the grammar.
    """
    from search.planning.space import freed

    # at another batch the result would compare batches
    batches = None if baseline.plan is None else (baseline.plan.global_batch,)
    pins, dropped = freed(session.options.pin, rule)
    options = replace(session.options, pin=(*pins, rule))
    left_out = tuple(f"--pin {pin}" for pin in dropped)
    first: ConstrainedResult | None = None
    widths = widest(session.hardware.world_size)
    for names in ((), *_bounds(options, widths)):
        wider: dict[str, Any] = {name: widths[name] for name in names}
        asked = replace(options, **wider)
        said = tuple(_said(options, name) for name in names)
        try:
            result = session.rebuilt(options=asked).solve(global_batch_sizes=batches)
        except InputError as error:
            first = first or ConstrainedResult(result=None, reason=str(error), left_out=left_out)
            continue
        found = ConstrainedResult(result=result, left_out=(*left_out, *said))
        # a plan that needs more memory is a more useful result than no plan
        if result.infeasibility is None or result.infeasibility.smallest_budget_bytes > 0:
            return found
        first = first or found
    assert first is not None, "the question itself was asked"
    return first


def _bounds(options: SearchOptions, widths: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return groups of option fields that restrict the search space: each field, then all.

    widths : field -> least restrictive value. Fields changed by the user come before defaults.
    """
    usual = SearchOptions()
    fields = [row.field for row in rows_of(SearchOptions) if row.panel == SPACE_PANEL]
    bounding = [
        name
        for name in fields
        # rules have no key for the default data-parallel type, so none conflicts with it
        if name in widths and name != "default_dp_type"
        if getattr(options, name) != widths[name]
    ]
    bounding.sort(key=lambda name: getattr(options, name) == getattr(usual, name))
    return [(name,) for name in bounding] + ([tuple(bounding)] if len(bounding) > 1 else [])


def _said(options: SearchOptions, name: str) -> str:
    row = next(row for row in rows_of(SearchOptions) if row.field == name)
    value = getattr(options, name)
    if row.flaglike:
        return f"--{row.name}"
    raw = written(row, value) if value is not None else row.shown
    return f"--{row.name} {' '.join(raw) if isinstance(raw, list) else raw}"
