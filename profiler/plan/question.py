"""What is asked of which plan: options, plan file and model together, as one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.catalog import find_model
from autopar.errors import DocumentError, InputError, OptionError
from autopar.jsonio import shorten
from autopar.legality import violations
from autopar.model import ModelSpec
from autopar.plan import Plan
from autopar.plan_files import read_plan_document, read_strategy
from autopar.specs import load_spec
from profiler.plan.global_mode import make_plan
from profiler.plan.job import PlanJob, Precision
from profiler.plan.options import Mode, PlanOptions
from profiler.plan.prediction import Prediction, read_prediction
from profiler.plan.scale import scale_down

__all__ = ["Question", "ask"]

_RUN_HERE: Mapping[str, Precision] = {"fp32": "fp32", "bf16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A job, where it comes from, and what was predicted of it."""

    job: PlanJob
    source: str
    """The plan's file, or `GLOBAL mode`."""
    problems: tuple[str, ...]
    """Why the plan is illegal, each with its arithmetic."""
    prediction: Prediction | None
    """None where the file has none, or one of another run than this."""
    notes: tuple[str, ...]
    """What was assumed, left out or scaled, in sentences."""


def ask(options: PlanOptions, *, mode: Mode, launched: int | None = None) -> Question:
    """Return the job that the options describe.

    launched : ranks that torchrun started, None without it; the world size of a plan that does
        not say it.

    Raises
    ------
    InputError: something is missing, unusable or contradicts something else.
    """
    stored = _Stored(options.plan)
    notes: list[str] = []
    world = options.world_size or launched
    spec = _load_model(options, stored)
    if options.plan is None:
        source = "GLOBAL mode"
        plan = make_plan(options.uniform, num_layers=spec.num_layers, world_size=_known(world))
    else:
        source = str(options.plan)
        plan = _read(options.plan, stored.document, world)
        if options.uniform.given:
            notes.append(
                f"the plan file says the strategy, so {', '.join(options.uniform.given)} "
                f"{'is' if len(options.uniform.given) == 1 else 'are'} ignored"
            )
    if options.world_size is not None and options.world_size != plan.world_size:
        raise OptionError(
            f"--world-size is {options.world_size} and {source} is a plan of {plan.world_size} "
            "ranks; leave the option out"
        )
    if len(plan.layers) != spec.num_layers:
        raise InputError(
            f"{source} has {len(plan.layers)} layers and model {spec.name!r} has "
            f"{spec.num_layers}; name the model that the plan is of, or give --num-layers "
            f"{len(plan.layers)} to take that many layers of this one"
        )
    for layer in spec.layers:
        if 0 < spec.learned_positions < layer.seq_length:
            raise OptionError(
                f"--seq: model {spec.name!r} has {spec.learned_positions} learned positions and "
                f"the sequence length is {layer.seq_length}; give a shorter one"
            )
    job = _job(options, stored, mode, plan, spec, notes)
    prediction: Prediction | None = None
    why: tuple[str, ...] = ()
    if options.plan is not None:
        prediction = read_prediction(options.plan, stored.document, num_stages=plan.num_stages)
        why = _other_run(stored, job, plan, spec)
    if prediction is not None and why:
        notes.append(
            f"the prediction in {source} is of another run ({', '.join(why)}), and is left out"
        )
        prediction = None
    if prediction is not None and not stored.has_options:
        notes.append(
            "the file does not say the sequence length, precision and options that its prediction "
            "is for; they are taken to be those of this run"
        )
    problems = violations(job.plan, job.spec, sequence_parallel=job.sequence_parallel)
    return Question(
        job=job, source=source, problems=problems, prediction=prediction, notes=tuple(notes)
    )


# --- plan and model ------------------------------------------------------------------------


class _Stored:
    """What a plan file or a result of ours says besides the plan; empty for other files."""

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path()
        self.document = {} if path is None else read_plan_document(path)
        self.options = self._mapping("options")
        self.request = self._mapping("request")
        self.has_options = bool(self.options)

    def _mapping(self, key: str) -> Mapping[str, object]:
        # strategies have no such keys, and what they hold instead their reader checks
        is_ours = "format" in self.document or "status" in self.document
        value = self.document.get(key, {}) if is_ours else {}
        if not isinstance(value, Mapping):
            raise DocumentError(self.path, f"expected an object, got {shorten(value)}", key=key)
        return value

    def flag(self, key: str) -> bool | None:
        value = self.options.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._unusable(f"options.{key}", value, "true or false")
        return value

    def text(self, where: str, key: str) -> str | None:
        value = (self.options if where == "options" else self.request).get(key)
        if value is not None and not isinstance(value, str):
            raise self._unusable(f"{where}.{key}", value, "a text")
        return value

    def counts(self, key: str) -> tuple[int, ...] | None:
        """Return a comma list of the request."""
        text = self.text("request", key)
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and len(part) < 10 for part in parts):
            raise self._unusable(f"request.{key}", text, "a comma list of numbers")
        return tuple(map(int, parts))

    def _unusable(self, key: str, value: object, expected: str) -> DocumentError:
        return DocumentError(
            self.path,
            f"expected {expected}, got {shorten(value)}",
            key=key,
            remedy="write the plan again with autopar-search",
        )


def _load_model(options: PlanOptions, stored: _Stored) -> ModelSpec:
    name = options.model or stored.text("request", "model")
    if name is None:
        file = "the options of GLOBAL mode do" if options.plan is None else f"{options.plan} does"
        raise OptionError(
            f"--model is missing: {file} not say what model the plan is of; give a shipped name, "
            "a config.json or a model.json"
        )
    try:
        find_model(name)
    except InputError as error:
        if options.model is not None:
            raise
        raise DocumentError(
            stored.path, str(error), key="request.model", remedy="or give --model"
        ) from None
    spec = load_spec(
        name,
        num_layers=options.num_layers or stored.counts("num-layers"),
        seq_length=_seq_length(options, stored),
        hidden_size=stored.counts("hidden-size"),
    )
    for index, layer in enumerate(spec.layers):
        for key in ("num_heads", "ffn_hidden_size"):
            if getattr(layer, key) is None:
                raise InputError(
                    f"model {spec.name!r}: {key} of layer type {index} is unknown; give it in "
                    "model.json"
                )
    return spec


def _seq_length(options: PlanOptions, stored: _Stored) -> Sequence[int] | None:
    return (options.seq_length,) if options.seq_length else stored.counts("seq-length")


def _read(path: Path, document: Mapping[str, object], world: int | None) -> Plan:
    try:
        return read_strategy(document, world_size=world)
    except DocumentError as error:
        remedy = error.remedy
        if error.key == "world_size" and world is None:
            remedy = "give --world-size, or start with torchrun"
        raise DocumentError(path, error.problem, key=error.key, remedy=remedy) from None


def _known(world: int | None) -> int:
    if world is None:
        raise OptionError(
            "--world-size is missing: without a plan file nothing says how many ranks there are; "
            "give it, or start with torchrun"
        )
    return world


# --- the job and its prediction ------------------------------------------------------------


def _job(
    options: PlanOptions,
    stored: _Stored,
    mode: Mode,
    plan: Plan,
    spec: ModelSpec,
    notes: list[str],
) -> PlanJob:
    plan, spec = scale_down(
        plan,
        spec,
        layers=options.layers,
        global_batch=options.global_batch,
        num_microbatches=options.num_microbatches,
    )

    def flag(given: bool | None, key: str) -> bool:
        for value in (given, stored.flag(key)):
            if value is not None:
                return value
        return True

    return PlanJob(
        plan=plan,
        spec=spec,
        sequence_parallel=flag(options.sequence_parallel, "sequence_parallel"),
        async_grad_reduce=flag(options.async_grad_reduce, "async_grad_reduce"),
        precision=_precision(options, stored, mode, notes),
        seed=options.seed,
    )


def _precision(options: PlanOptions, stored: _Stored, mode: Mode, notes: list[str]) -> Precision:
    if options.precision is not None:
        return options.precision
    text = stored.text("options", "mixed_precision")
    if text == "fp16":
        notes.append("the plan is for fp16; bf16, of the same size, is used instead")
        return "bf16"
    if text is not None and text not in _RUN_HERE:
        raise DocumentError(
            stored.path,
            f"expected {', '.join(_RUN_HERE)} or fp16, got {shorten(text)}",
            key="options.mixed_precision",
            remedy="give --mixed-precision",
        )
    return _RUN_HERE[text] if text else ("bf16" if mode == "dryrun" else "fp32")


def _other_run(stored: _Stored, job: PlanJob, whole: Plan, spec: ModelSpec) -> tuple[str, ...]:
    """Return in what a job differs from the one that was predicted; `spec` is of `whole`."""
    differences = []
    if job.plan.layers != whole.layers:
        differences.append(f"{len(whole.layers)} layers, here {len(job.plan.layers)}")
    if job.plan.global_batch != whole.global_batch:
        differences.append(f"batch {whole.global_batch}, here {job.plan.global_batch}")
    if job.plan.num_microbatches != whole.num_microbatches:
        differences.append(
            f"{whole.num_microbatches} micro-batches, here {job.plan.num_microbatches}"
        )
    if not stored.has_options:
        return tuple(differences)
    differences += _other_model(stored, spec)
    texts = {True: "with", False: "without"}
    for key, word in (
        ("sequence_parallel", "sequence parallelism"),
        ("async_grad_reduce", "one reduction of gradients per step"),
    ):
        then, now = stored.flag(key), getattr(job, key)
        if then is not None and then != now:
            differences.append(f"{texts[then]} {word}, here {texts[now]}")
    then_precision = stored.text("options", "mixed_precision")
    alike = {job.precision, "fp16"} if job.precision == "bf16" else {job.precision}
    if then_precision is not None and then_precision not in alike:
        differences.append(f"{then_precision}, here {job.precision}")
    return tuple(differences)


def _other_model(stored: _Stored, spec: ModelSpec) -> list[str]:
    """Return in what a model differs from the one that a plan file was made for."""
    name = stored.text("request", "model")
    if name is None:  # made of measured files alone, so nothing is known of it but its sizes
        return []
    try:
        own = load_spec(
            name,
            num_layers=stored.counts("num-layers"),
            seq_length=stored.counts("seq-length"),
            hidden_size=stored.counts("hidden-size"),
        )
    except InputError:
        return [f"model {name}, which is not here"]
    then, now = (sorted({layer.seq_length for layer in s.layers}) for s in (own, spec))
    if then != now:
        shown = (", ".join(map(str, lengths)) for lengths in (then, now))
        return [f"sequence length {next(shown)}, here {next(shown)}"]
    return [] if own == spec else [f"model {own.name}, here {spec.name} of other sizes"]
