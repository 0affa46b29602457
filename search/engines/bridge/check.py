"""Check of Megatron-Bridge files: scripts that run its launchers with overrides, and YAML.

`search.engines.bridge.read` reads the settings. The constraints are those of Megatron-Core in
`search.engines.megatron.rules`. Messages name keys of the file instead of Megatron-LM arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from autopar.errors import did_you_mean
from autopar.records import Record, replace
from autopar.run.rules import Kind, Notice, broken, notice, without_repetitions
from autopar.run.run import Run
from autopar.run.runtime import BLACKWELL
from autopar.training.lengths import KnownBatching
from search.engines.arguments import BOTH, variables_of, words_of
from search.engines.bridge.keys import ARGUMENTS, FLAG_OF_KEY, KEYS, RELEASES, span_of
from search.engines.bridge.read import (
    BridgeFile,
    GivenSetting,
    flags_of_settings,
    is_length,
    needed_sizes,
    other_keys,
    read_bridge,
    run_of_settings,
)
from search.engines.bridge.recipes import Settings, recompute_settings
from search.engines.changes import Changes, arguments_of, even_stages
from search.engines.engine import EngineRelease, asked_release
from search.engines.megatron.check import same_run
from search.engines.megatron.findings import findings_of
from search.engines.megatron.names import KNOWN_VARIABLES, VARIABLES
from search.engines.megatron.rules import HYBRID_CHUNKS, OF_ARGUMENTS, broken_rules
from search.engines.megatron.setting import Setting
from search.engines.reader import (
    MISSING,
    CheckedFile,
    CheckOptions,
    ReadResult,
    attempt,
    read_notes,
    release_notices,
    unread,
    world_size_of,
)
from search.engines.text import Configuration

_STACK = "megatron-core"
_FLAG = re.compile(r"--[a-z0-9]+(?:-[a-z0-9]+)*|(?<![\w-])[a-z0-9]+(?:-[a-z0-9]+)+")
"""Pattern of Megatron-LM arguments in a sentence, with or without leading hyphens."""
_NEW = {
    "model.tensor_model_parallel_size": "-tp",
    "model.pipeline_model_parallel_size": "-pp",
    "model.context_parallel_size": "-cp",
    "model.virtual_pipeline_model_parallel_size": "-vp",
    "model.expert_model_parallel_size": "-ep",
    "model.expert_tensor_parallel_size": "-et",
    "train.micro_batch_size": "-mb",
}
"""Key -> argument that a suggested change adds to a performance script."""
_TP, _SP = "model.tensor_model_parallel_size", "model.sequence_parallel"
_SEQ = "model.seq_length"
_LAYOUT = "model.pipeline_model_parallel_layout"


class _Place(Record):
    """Name of a file, with the GPUs and environment variables of its run."""

    world_size: int
    environment: Mapping[str, str]
    gpu: str
    name: str

    def read(self, settings: Settings) -> ReadResult:
        """Return the run that settings describe, or the findings that prevent reading it.

        settings : combined settings of recipe and file.
        """
        return attempt(
            lambda: run_of_settings(
                settings,
                world_size=self.world_size,
                environment=self.environment,
                gpu=self.gpu,
                source=self.name,
            )
        )

    def setting(self, settings: Settings) -> Setting:
        """Return the settings as Megatron-LM arguments, for the evaluation of rules."""
        flags = flags_of_settings(settings, self.world_size)
        if settings.get("optimizer.use_precision_aware_optimizer") is True:
            # `flags_of_settings` omits this flag, which only rules read here.
            flags["use-precision-aware-optimizer"] = True
        return Setting(words_of(flags), self.world_size, self.gpu.upper())


def read(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a file describes, with the findings on its settings.

    Raises DocumentError if the number of GPUs is unknown or contradictory.
    """
    file = read_bridge(source, None if asked.release is None else asked.release.name)
    release = asked.release or asked_release(file.release, RELEASES)
    world = world_size_of(source.path, file.world_size, asked)
    settings = file.settings(world)
    place = _Place(
        world_size=world,
        environment=_with_connections(file, settings, asked.gpu),
        gpu=asked.gpu,
        name=str(source.path),
    )
    ignored = (
        *file.ignored,
        *other_keys(file.own, whole=file.is_whole),
        *variables_of(file.environment, VARIABLES, KNOWN_VARIABLES),
    )
    found, said = ReadResult(), list[Notice]()
    unpriced = file.unpriced or (None if asked.lengths else file.packed)
    if unpriced is not None:
        said.append(replace(_fact("unpriced", "not priced", unpriced), withdraws=BOTH))
    elif file.unknown:
        remedy = "Write the value into the file"
        rows = (_fact("unknown", "not understood", text, remedy) for text in file.unknown)
        said += [replace(one, withdraws=BOTH) for one in rows]
    else:
        # A known recipe has all sizes. Others are in Python, or in a file that this one changes.
        named = file.recipe.model is not None
        missing = [] if named else [key for key in needed_sizes(settings) if key not in settings]
        if not missing:
            found = place.read(settings)
            wanted = [one.values["key"] for one in found.problems if one.id == MISSING]
            missing = [] if named else [_worded(file, settings, str(flag)) for flag in wanted]
        if missing:
            text = f"sizes of the model of {file.recipe.name} unknown: add {', '.join(missing)} "
            text += "and the others, or name a recipe that is known"
            said.append(replace(_fact("sizes", "not priced", text), withdraws=BOTH))
            found = ReadResult()
        if not missing or file.is_whole:
            said += _findings(file, settings, place, found, release)
    said += unread("bridge", ignored, partial(_line, file), _meant)
    said += read_notes((*file.notes, *_of_device(file, asked)))
    return CheckedFile(
        path=str(source.path),
        trainer="Megatron-Bridge",
        stack=_STACK,
        world_size=world,
        num_nodes=source.num_nodes,
        run=found.run,
        findings=without_repetitions(said),
        harmless=tuple(one for one in ignored if one.understood),
        words={one.spelled: (one.value,) for one in file.given},
        batching=None if file.packed is None else KnownBatching("packed"),
        written=partial(_written, file, place, found.run),
        spelled=partial(_line, file),
        worded=partial(_worded, file, settings),
    )


def _meant(flag: str) -> str:
    """Return the suggestion of a known key or argument similar to an unknown one; else empty."""
    names = KEYS if "." in flag else [f"--{name}" for name in ARGUMENTS]
    return did_you_mean(flag, sorted(names), least=0.9)


def _fact(name: str, kind: Kind, text: str, remedy: str = "") -> Notice:
    return replace(notice(f"bridge.{name}", kind, "{fact}", fact=text), remedy=remedy)


_RECIPES_OWN = {"NVTE_CPU_OFFLOAD_V1": "1"}
"""Environment variables that recipes with activation offload set in `env_vars`."""


def _with_connections(file: BridgeFile, settings: Settings, gpu: str) -> dict[str, str]:
    """Return the environment variables of the ranks, including those that Megatron-Bridge sets.

    Before Blackwell, Bridge sets CUDA_DEVICE_MAX_CONNECTIONS to 32 for overlapped expert
    communication and to 1 otherwise, but not with Megatron-FSDP.

    Sources: `_set_num_cuda_device_max_connections` of
    `src/megatron/bridge/training/comm_overlap.py`, and the launchers of the performance scripts.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    sharded = any(settings.get(f"{name}.use_megatron_fsdp") is True for name in ("ddp", "dist"))
    beside = "overlap_moe_expert_parallel_comm"
    several = any(settings.get(f"{name}.{beside}") is True for name in ("comm_overlap", "model"))
    if sharded or gpu.upper().startswith(BLACKWELL):
        return {**_RECIPES_OWN, **file.environment}
    return {name: "32" if several else "1", **_RECIPES_OWN, **file.environment}


def _of_device(file: BridgeFile, asked: CheckOptions) -> Iterator[str]:
    if file.gpu is not None and not asked.gpu.startswith(file.gpu.lower()):
        yield f"the recipe is that of {file.gpu}, and it is priced for {asked.gpu}"


# --------------------------------------------------------------------------------------------------
# Findings, which name the keys of the file.


def _findings(
    file: BridgeFile,
    settings: Settings,
    place: _Place,
    found: ReadResult,
    release: EngineRelease,
) -> Iterator[Notice]:
    spelled = file.spelled
    yield from release_notices("bridge", release, ((key, span_of(key)) for key in spelled))
    own = {f"--{flag}" for key, flag in FLAG_OF_KEY.items() if key in spelled}
    if found.unpriced is not None:
        yield _in_keys(file, settings, found.unpriced)
    for one in findings_of(
        place.setting(settings).words,
        world_size=place.world_size,
        environment=place.environment,
        gpu=place.gpu,
        ignored=found.ignored,
        problems=found.problems,
        run=found.run,
    ):
        # Findings of kind `no effect` or `not understood` are reported only for keys of the file,
        # not for settings of the recipe.
        of_file = _flag_of(one) in own and not file.is_whole
        if one.id in OF_ARGUMENTS:
            continue  # Megatron-Bridge sets its configuration without `validate_args`
        if one.kind not in ("no effect", "not understood") or of_file:
            yield _in_keys(file, settings, one)
    yield from _idle(file, settings)
    yield from _of_samples(file)
    run = found.run
    if run is not None:
        values = {"hybrid": run.model.is_hybrid, "vpp": run.strategy.vpp}
        yield from broken((HYBRID_CHUNKS,), values)
    if run is not None and run.model.experts is not None and run.runtime.experts.fused_mlp:
        text = "memory saved by fused experts is unknown and not counted; their time is"
        yield _fact("fused-experts", "not priced", text)
    if settings.get("mixed_precision.first_last_layers_bf16") is True:
        text = "the first and the last layer stay in bf16, and are counted and priced in 8 bits"
        yield _fact("ends", "read", text)


def _flag_of(one: Notice) -> str:
    """Return the flag of a notice on a flag without effect or an unknown flag; else empty."""
    given = str(one.values.get("flag", one.values.get("given", "")))
    return f"--{given.split()[0].lstrip('-')}" if given else ""


def _idle(file: BridgeFile, settings: Settings) -> Iterator[Notice]:
    """Yield notices on settings of the file that Megatron-Bridge ignores or that are overridden."""
    own, spelled = file.own, file.spelled
    for one in file.given:
        for key in one.settings:
            if spelled[key] is not one and spelled[key].spelled != one.spelled:
                text = f"{one.spelled} ({spelled[key].spelled} takes precedence)"
                yield _fact("no-effect", "no effect", text)
    configured = any(key.startswith("comm_overlap.") for key in settings)
    sharded = settings.get("ddp.use_distributed_optimizer") is True
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        # A `comm_overlap` section overrides `ddp`; its default is True.
        kept = settings.get(f"comm_overlap.{name}", True)
        if configured and sharded and own.get(f"ddp.{name}", kept) != kept:
            text = f"ddp.{name} (comm_overlap.{name} is {str(kept).lower()})"
            yield _fact("no-effect", "no effect", text)
    precise = settings.get("mixed_precision.grad_reduce_in_fp32")
    if own.get("ddp.grad_reduce_in_fp32", precise) != precise:
        text = "ddp.grad_reduce_in_fp32 (mixed_precision.grad_reduce_in_fp32 is "
        yield _fact("no-effect", "no effect", f"{text}{str(precise).lower()})")
    scattered = settings.get(_SP) is True and settings.get(_TP) not in (None, 1)
    if own.get("comm_overlap.tp_comm_overlap") is True and not scattered:
        text = "comm_overlap.tp_comm_overlap (no sequence parallelism)"
        yield _fact("no-effect", "no effect", text)


def _of_samples(file: BridgeFile) -> Iterator[Notice]:
    """Yield a notice if the sequence length of the model differs from that of the samples.

    `run_recipe.py` uses the sample length for both (`sync_model_dataset_sequence_length`). In other
    scripts, an assertion fails (`ConfigContainer.validate`).
    """
    recipe, spelled = file.recipe, file.spelled.get(_SEQ)
    known = None
    if recipe.model is not None and (recipe.kind == "performance" or not recipe.notes):
        known = recipe.settings.get(_SEQ)
    if file.samples is not None:
        key, samples = file.samples
        other = file.own.get(_SEQ, known)
        if is_length(other) and other not in (None, samples):
            text = f"{_line(file, key, str(samples))} is taken for the model's length as well, as "
            text += f"run_recipe.py does; other scripts refuse it with {_SEQ} {other}"
            yield _fact("samples", "read", text)
    elif spelled is not None and spelled.spelled == _SEQ and known not in (None, file.own[_SEQ]):
        text = f"{_line(file, _SEQ, spelled.value)} is without effect in run_recipe.py and "
        text += f"refused by other scripts, where samples stay at the {known} of the recipe; "
        text += "dataset.seq_length (early releases: dataset.sequence_length) must be set as well"
        yield _fact("samples", "read", text)


def _in_keys(file: BridgeFile, settings: Settings, one: Notice) -> Notice:
    """Return a notice with Megatron-LM arguments replaced by keys of the file."""
    problem, remedy = (_worded(file, settings, text) for text in (one.problem, one.remedy))
    values = dict(one.values)
    if one.withdraws and "flag" in values:
        values["flag"] = _worded(file, settings, f"--{values['flag']}")
        values["given"] = _worded(file, settings, str(values["given"]))
    return replace(one, problem=problem, remedy=remedy, values=values)


def _worded(file: BridgeFile, settings: Settings, text: str) -> str:
    """Return a sentence with Megatron-LM arguments replaced by keys of the file."""
    spelled = file.spelled

    def own(found: re.Match[str]) -> str:
        keys = [key for key, flag in FLAG_OF_KEY.items() if flag == found[0].removeprefix("--")]
        # Prefer a key that the file sets to one that its recipe sets.
        said = next((key for key in reversed(keys) if key in spelled), None)
        if said is not None:
            return spelled[said].spelled
        return next((key for key in reversed(keys) if key in settings), (*keys, found[0])[0])

    return _FLAG.sub(own, text)


def _line(file: BridgeFile, key: str, value: str | None) -> str:
    """Return a key with its value in the format of the file, such as `KEY: VALUE` in YAML."""
    if not value:
        return key
    if key.startswith("-"):
        return f"{key} {value}"
    return f"{key}{_BETWEEN[file.form]}{value}"


_BETWEEN = {"script": "=", "document": ": ", "python": " = "}


# --------------------------------------------------------------------------------------------------
# Changes of the file for other runs.


def _written(file: BridgeFile, place: _Place, before: Run | None, after: Run) -> Changes | None:
    """Return the changes that turn a file of run `before` into one of run `after`.

    The changed settings are read again. None: they do not describe `after`, or break a rule.
    """
    assert before is not None, "only a run that was read has others next to it"
    one, other = _turned(before), _turned(after)
    changed = {key: value for key, value in other.items() if one.get(key) != value}
    settings = file.settings(place.world_size)
    configured = any(key.startswith("comm_overlap.") for key in settings)
    if not configured:
        if changed.pop("comm_overlap.tp_comm_overlap", None):
            return None  # without a `comm_overlap` section, an override cannot set it
        if "comm_overlap.overlap_grad_reduce" in changed:
            changed["ddp.overlap_grad_reduce"] = changed.pop("comm_overlap.overlap_grad_reduce")
    given = _replaced(file, changed, {**settings, **one})
    again = replace(file, given=given)
    wanted = again.settings(place.world_size)
    found = place.read(wanted)
    if found.run is None or not same_run(found.run, after):
        return None
    if broken_rules(place.setting(wanted), (), found.run):
        return None
    was = {one.spelled: one.value for one in file.given}
    is_ = {one.spelled: one.value for one in given}
    return tuple(
        (key, was.get(key), is_.get(key))
        for key in dict.fromkeys((*was, *is_))
        if was.get(key) != is_.get(key)
    )


def _replaced(file: BridgeFile, changed: Settings, settings: Settings) -> tuple[GivenSetting, ...]:
    """Return the settings of a file with changed keys, in the spelling of the file.

    An argument that sets several keys is replaced by one setting for each key.

    changed : new values by key. settings : combined settings of recipe and file.
    """
    left = dict(changed)
    found = list[GivenSetting]()
    for one in file.given:
        mine = [key for key in one.settings if key not in one.derived]
        if not left.keys() & mine:
            found.append(one)
        elif len(mine) == 1:
            found.append(_given(one.spelled, mine[0], left.pop(mine[0])))
        else:
            left = {**{k: settings[k] for k in mine if k in settings}, **left}
    tensor = ("-tp", "--tensor_model_parallel_size")
    if any(one.spelled in tensor for one in found):
        left.pop(_SP, None)
    for key, value in left.items():
        if key != _LAYOUT and value == file.recipe.settings.get(key):
            continue  # the recipe sets this value already
        flag = None if file.form != "script" or file.recipe.kind != "performance" else _NEW.get(key)
        found.append(_given(flag or key, key, value))
    follows = any(_SP in one.derived for one in found)
    # -tp also sets sequence parallelism, which then needs no separate setting.
    return file.ordered(one for one in found if not follows or one.spelled != _SP)


def _given(spelled: str, key: str, value: Any) -> GivenSetting:
    if spelled.startswith("-") and not isinstance(value, list):
        settings: Settings = {key: value}
        derived = frozenset[str]()
        if key == _TP:
            settings[_SP] = isinstance(value, int) and value > 1
            derived = frozenset({_SP})
        return GivenSetting(
            spelled=spelled,
            value="None" if value is None else str(value),
            settings=settings,
            derived=derived,
        )
    shown = f"[{','.join(value)}]" if isinstance(value, list) else _scalar(value)
    return GivenSetting(spelled=spelled, value=shown, settings={key: value})


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _turned(run: Run) -> Settings:
    """Return the settings of a run that suggested changes may modify, by dotted key."""
    strategy, split, overlap = run.strategy, run.split, run.runtime.overlap
    pp, vpp = strategy.pp, strategy.vpp
    words = arguments_of(run)
    even = pp == 1 or strategy.stages == even_stages(run)
    found: Settings = {
        _TP: split.tp,
        "model.pipeline_model_parallel_size": pp,
        "model.context_parallel_size": split.cp,
        _SP: split.splits_sequence,
        "model.virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "model.pipeline_model_parallel_layout": None if even else "as it is",
        "train.micro_batch_size": strategy.micro_batch,
        **recompute_settings(strategy),
        "ddp.use_distributed_optimizer": split.zero == 1,
        "comm_overlap.overlap_grad_reduce": overlap.gradients,
        "comm_overlap.tp_comm_overlap": overlap.tensor,
    }
    if pp > 1:
        for name in ("embedding", "loss"):
            flag = f"account-for-{name}-in-pipeline-split"
            found[f"model.account_for_{name}_in_pipeline_split"] = flag in words
    if run.model.experts is not None:
        found["model.expert_model_parallel_size"] = split.ep
        found["model.expert_tensor_parallel_size"] = split.etp
    return found


def card(source: Configuration) -> str | None:
    """Return the card name of the GPU model that a file names; None: not given or unknown."""
    gpu = read_bridge(source).gpu
    # Recipes name devices by the beginning of a card name, such as h100.
    return None if gpu is None else _CARDS.get(gpu.lower())


_CARDS = {
    "h100": "h100-80gb",
    **{name: name for name in ("b200", "b300", "gb200", "gb300", "vr200")},
}
