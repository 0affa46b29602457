"""Values that the rules of `search.engines.megatron.rules` read, from Megatron-LM arguments.

Rules read values by name: the name of a flag is True if it is given, `flag=word` if the flag has
this word. Other names are in `NUMBERS` and `FACTS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from autopar.errors import shortened
from autopar.rates.devices import lacks_flash_attention, lacks_precision, lacks_sparse_attention
from search.engines.arguments import is_open
from search.engines.megatron.arguments import LayoutError
from search.engines.megatron.stages import (
    PATTERN,
    LayerPattern,
    chunks_of_layout,
    parse_pattern,
)

Words = Mapping[str, tuple[str, ...]]
"""Words by flag without leading hyphens."""
VIRTUAL = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
_PLACED = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
_COUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
_AMD = ("MI2", "MI3", "MI4")
NUMBERS: Mapping[str, tuple[str, int | None]] = {
    "tp": ("tensor-model-parallel-size", 1),
    "pp": ("pipeline-model-parallel-size", 1),
    "cp": ("context-parallel-size", 1),
    "ep": ("expert-model-parallel-size", 1),
    "micro_batch": ("micro-batch-size", 1),
    "heads": ("num-attention-heads", None),
    "hidden": ("hidden-size", None),
    "ffn_hidden_size": ("ffn-hidden-size", None),
    "seq_length": ("seq-length", None),
    "positions": ("max-position-embeddings", None),
    "topk": ("moe-router-topk", 2),
    "router_groups": ("moe-router-num-groups", 1),
    "group_topk": ("moe-router-group-topk", 0),
    "chunk_layers": (VIRTUAL[0], 0),
    "first_bf16": ("num-layers-at-start-in-bf16", 1),
    "last_bf16": ("num-layers-at-end-in-bf16", 1),
    "save_interval": ("save-interval", 1),
    "retain_interval": ("save-retain-interval", 0),
    "offloaded_layers": ("cpu-offloading-num-layers", 0),
}
"""Name of a value -> (flag, default if the flag is not given). Default None means unknown, 0 that
the feature is absent. An invalid value, which the reader reports, counts as the default."""
_DEFAULTS = {
    "fp8-recipe": "delayed",
    "moe-token-dispatcher-type": "allgather",
    "moe-router-score-function": "softmax",
    "weight-decay-incr-style": "constant",
    "position-embedding-type": "learned_absolute",
    "ckpt-format": "torch_dist",
    "moe-flex-dispatcher-backend": "deepep",
}
"""Flag -> its word if it is not given."""


OF_RUN = (
    *("dp", "micro_batches", "chunks", "together", "ramp_second", "ramp_micro_batches"),
    *("mixer_projected", "sparse_latent"),
)
"""Values that are not in the arguments: rules compute them, or they depend on the run."""


class Setting(NamedTuple):
    """Arguments of a run on `world` GPUs, with the values that rules read."""

    words: Words
    world: int
    gpu: str = ""
    """GPU model, in capitals."""

    def has(self, flag: str) -> bool:
        return flag in self.words

    def number(self, flag: str, default: int | None = 1) -> int | None:
        """Return the number of a flag, `default` if it is not given or invalid; None: unknown.

        A shell variable is unknown. An invalid 0 counts as 1.
        """
        text = self.words.get(flag, ("",))[:1]
        if not text or not text[0]:
            return default
        if is_open(text[0]):
            return None
        if not _is_count(text[0]):
            return default
        # The reader reports 0 for flags that need a positive number.
        return int(text[0]) or (0 if default == 0 else 1)

    def list(self, flag: str) -> tuple[str, ...]:
        """Return the words of a flag, split at spaces; empty: flag not given."""
        return tuple(" ".join(self.words.get(flag, ())).split())

    def real(self, flag: str, default: float = 0.0) -> float:
        try:
            return float(" ".join(self.words.get(flag, ())))
        except ValueError:
            return default

    def value(self, name: str) -> Any:
        """Return the value of a name that rules use; None: unknown."""
        if name in OF_RUN:
            return None
        if name in FACTS:
            return FACTS[name](self)
        if name in NUMBERS:
            return self.number(*NUMBERS[name])
        flag, equals, word = name.partition("=")
        if not equals:
            return flag in self.words
        given = self.list(flag) or (_DEFAULTS.get(flag, ""),)
        return None if any(map(is_open, given)) else word in given

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the values of several names, by name; None: unknown."""
        return {name: self.value(name) for name in names}


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _any(*flags: str) -> Callable[[Setting], bool]:
    return lambda s: any(map(s.has, flags))


def _selective(s: Setting) -> bool:
    # --recompute-activations of earlier releases overrides the granularity.
    return bool(s.value("recompute-granularity=selective")) or s.has("recompute-activations")


def _recomputes(module: str) -> Callable[[Setting], bool | None]:
    def of(s: Setting) -> bool | None:
        given = s.value(f"recompute-modules={module}")
        return None if given is None else _selective(s) and given

    return of


def _scattered(s: Setting) -> bool | None:
    tp = s.value("tp")
    return False if not s.has("sequence-parallel") else None if tp is None else tp > 1


def _etp(s: Setting) -> int | None:
    return s.number("expert-tensor-parallel-size", s.value("tp")) if s.has("num-experts") else 1


def _batch(s: Setting) -> int | None:
    if s.has(STEPS):
        return next(reversed(batch_steps(s.list(STEPS))), None)
    tp, pp, cp, micro = (s.value(name) for name in ("tp", "pp", "cp", "micro_batch"))
    if None in (tp, pp, cp, micro):
        return s.number("global-batch-size", None)
    return s.number("global-batch-size", max(micro * (s.world // (tp * pp * cp)), 1))


STEPS = "step-batch-size-schedule"
"""Argument with the batch sizes of a training by tokens."""
_STEP = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?):([0-9]{1,12})")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_steps(words: Sequence[str]) -> tuple[int, ...]:
    """Return the global batch sizes of `--step-batch-size-schedule`, in the order of training.

    words : value of the argument, `THRESHOLD:BATCH` with thresholds in tokens from 0 on, such as
        `0:768 250B:1536`. Empty if it is not given or invalid.

    Source: `StepBatchsizeNumMicroBatchesCalculator` of megatron/core/num_microbatches_calculator.py
    (main of August 2026).
    """
    found = [_STEP.fullmatch(word.upper()) for word in " ".join(words).replace(",", " ").split()]
    steps = sorted((float(one[1]) * _UNITS[one[2]], int(one[3])) for one in found if one)
    starts = [start for start, _ in steps]
    rising = starts[:1] == [0.0] and len({*starts}) == len(starts) == len(found)
    return tuple(size for _, size in steps) if rising and all(size for _, size in steps) else ()


def _chunks(s: Setting) -> int | None:
    """Return the number of equal chunks per stage; None: other arguments set the partition."""
    layout = s.words.get("pipeline-model-parallel-layout")
    if layout or s.value("segments") != 1:
        return None
    if any(map(s.has, (VIRTUAL[0], *_PLACED, *_COUNTED))):
        return None
    return 1 if s.value("pp") == 1 else s.number(VIRTUAL[1])


def _pattern(s: Setting) -> LayerPattern | None:
    """Return the pattern of a hybrid model; None: not given, invalid or unknown."""
    given = s.words.get(PATTERN) or s.words.get("hybrid-override-pattern")
    if not given or is_open(given[0]):
        return None
    with suppress(LayoutError):
        return parse_pattern(given[0])
    return None


def _layers(s: Setting) -> int | None:
    pattern = _pattern(s)
    return s.number("num-layers", None) if pattern is None else len(pattern.letters)


def _mtp(s: Setting) -> int | None:
    pattern = _pattern(s)
    if pattern is not None and pattern.depths:
        return pattern.depths
    return s.number("mtp-num-layers", 0)


def _has_latent_attention(s: Setting) -> bool:
    pattern = _pattern(s)
    in_pattern = pattern is not None and not {*"+D"}.isdisjoint(pattern.letters + pattern.mtp)
    return in_pattern or s.has("multi-latent-attention")


def _sparse_heads(s: Setting) -> int | None:
    """Return the query heads if attention is sparse, else 0; None: unknown."""
    pattern = _pattern(s)
    in_pattern = pattern is not None and "D" in pattern.letters + pattern.mtp
    if not in_pattern and not s.value("experimental-attention-variant=dsa"):
        return 0
    return s.number("num-attention-heads", None)


def _segments(s: Setting) -> int | None:
    """Return the number of segments of a pattern, 1 without one; None: unknown."""
    if not any(map(s.has, (PATTERN, "hybrid-override-pattern"))):
        return 1
    pattern = _pattern(s)
    return None if pattern is None else len(pattern.segments)


def _layout(s: Setting) -> str | None:
    """Return the error message for the pipeline layout, empty if valid; None: none or unknown."""
    given = s.words.get("pipeline-model-parallel-layout")
    layers, pp, mtp = s.value("layers"), s.value("pp"), s.value("mtp")
    if not given or None in (layers, pp, mtp) or is_open(given[0]):
        return None
    try:
        chunks_of_layout(given[0], num_layers=layers, num_stages=pp, mtp=mtp)
    except LayoutError as error:
        return str(error)
    return ""


def _exchange(s: Setting) -> int | None:
    """Return the degree of all-to-all context parallelism; 1: not used; None: unknown."""
    if s.value("cp-comm-type=a2a"):
        return s.number("context-parallel-size")
    sizes = s.list("hierarchical-context-parallel-sizes")
    if s.value("cp-comm-type=a2a+p2p") and sizes:
        return int(sizes[0]) if _is_count(sizes[0]) else None
    return 1


def _hierarchy(s: Setting) -> int | None:
    sizes = s.list("hierarchical-context-parallel-sizes")
    return math.prod(map(int, sizes)) if sizes and all(map(_is_count, sizes)) else None


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = [*numbers]
    return None if None in known else sum(filter(None, known))


def placed_words(s: Setting) -> str | None:
    """Return the arguments that place layers on the first or last stage; None: there are none."""
    given = [f"--{flag} {' '.join(s.words[flag])}" for flag in _PLACED if s.has(flag)]
    return " and ".join(given) or None


def ramp(place: int) -> Callable[[Setting], int | None]:
    def of(s: Setting) -> int | None:
        ramp = s.list("rampup-batch-size")
        usable = len(ramp) == 3 and all(map(_is_count, ramp)) and int(ramp[0]) and int(ramp[1])
        return int(ramp[place]) if usable else None

    return of


ramp_start = ramp(0)
"""Function (Setting) -> first global batch size of a ramp-up; None: not given or invalid."""


def _gpus_of(names: tuple[str, ...]) -> Callable[[Setting], bool]:
    return lambda s: s.gpu.startswith(names)


def _only_lacks(precision: str) -> Callable[[Setting], bool]:
    """Return the fact that a GPU has fp8 GEMMs, but none in one of the scalings of fp8."""
    return lambda s: lacks_precision(s.gpu, precision) and not lacks_precision(s.gpu, "fp8")


def _unless_open(s: Setting, flag: str, fact: bool) -> bool | None:
    """Return a fact about the value of a flag; None if it contains a shell variable."""
    return None if any(map(is_open, s.list(flag))) else fact


FACTS: Mapping[str, Callable[[Setting], Any]] = {
    "world": lambda s: s.world,
    "layers": _layers,
    "mtp": _mtp,
    "segments": _segments,
    # `validate_args` derives it from the pattern
    "multi-latent-attention": _has_latent_attention,
    "sparse_heads": _sparse_heads,
    "hybrid": _any(PATTERN, "hybrid-override-pattern"),
    "amd": _gpus_of(_AMD),
    "no_flash": lambda s: lacks_flash_attention(s.gpu),
    "no_sparse": lambda s: lacks_sparse_attention(s.gpu),
    "no_fp8": lambda s: lacks_precision(s.gpu, "fp8"),
    "no_fp8_block": _only_lacks("fp8_block"),
    "no_mxfp8": _only_lacks("mxfp8"),
    "no_nvfp4": lambda s: lacks_precision(s.gpu, "nvfp4"),
    "ulysses": lambda s: 1,
    "sequence_parallel": lambda s: s.has("sequence-parallel"),
    "scattered": _scattered,
    # Without --num-query-groups, or with -1, the number of groups is that of heads.
    "kv_heads": lambda s: s.number("num-query-groups", s.value("heads")),
    "experts": lambda s: s.number("num-experts", None if s.has("num-experts") else 0),
    "etp": _etp,
    "global_batch": _batch,
    "vpp": _chunks,
    "virtual": lambda s: _any(*VIRTUAL, "pipeline-model-parallel-layout")(s) or (
        (s.value("segments") or 1) > (s.value("pp") or 1)),
    "virtual_stages": _any(*VIRTUAL),
    "layout_problem": _layout,
    "exchange": _exchange,
    "comm_types": lambda s: len(s.words.get("cp-comm-type", ())),
    "hierarchy": _hierarchy,
    "sharded": _any("use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2"),
    "fsdp": _any("use-megatron-fsdp", "use-custom-fsdp"),
    "fused_accumulation": lambda s: not _any(
        "gradient-accumulation-fusion", "no-gradient-accumulation-fusion")(s),
    "placed": _any(*_PLACED),
    "placed_layers": lambda s: _sum(s.number(flag, 0) for flag in _PLACED),
    "placed_stages": lambda s: sum(map(s.has, _PLACED)),
    "placed_words": placed_words,
    "counted": _any(*_COUNTED),
    "places_otherwise": _any(*_PLACED, *_COUNTED, *VIRTUAL),
    "16_bits": _any("bf16", "fp16"),
    "selective": _selective,
    **{f"recomputes {module}": _recomputes(module)
       for module in ("moe_act", "mla_up_proj", "gdn_norm_out", "layernorm", "shared_experts")},
    "rotary": _any("use-rotary-position-embeddings"),
    "lr_excess": lambda s: s.real("min-lr") > s.real("lr", math.inf),
    "warm_up_iters": lambda s: s.real("lr-warmup-iters") > 0,
    "warm_up_samples": lambda s: s.real("lr-warmup-samples") > 0,
    "decay_ends": lambda s: sum(map(s.has, ("start-weight-decay", "end-weight-decay"))),
    "data_sources": lambda s: sum((s.has("mock-data"), s.has("data-path"), _any(
        "train-data-path", "valid-data-path", "test-data-path")(s))),
    "narrow_states": lambda s: any(
        s.has(flag) and s.value(f"{flag}=fp32") is False for flag in (
            "main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")),
    "padded": _any("moe-router-padding-for-quantization", "moe-router-padding-for-fp8"),
    "fp8": _any("fp8-format"),
    "low_precision": _any("fp8-format", "fp4-format"),
    "balancing_types": lambda s: len(s.list("moe-router-load-balancing-type")),
    "balancing_coefficients": lambda s: len(s.list("moe-aux-loss-coeff")),
    "muon": lambda s: "muon" in " ".join(s.words.get("optimizer", ())),
    "group": lambda s: s.number(
        "microbatch-group-size-per-virtual-pipeline-stage", s.value("pp")),
    "ramp_words": lambda s: shortened(" ".join(s.list("rampup-batch-size"))),
    "bad_steps": lambda s: _unless_open(
        s, STEPS, s.has(STEPS) and not batch_steps(s.list(STEPS))),
    "steps_words": lambda s: " ".join(s.list(STEPS)),
    "first_step": lambda s: next(iter(batch_steps(s.list(STEPS))), None),
    "bad_ramp": lambda s: _unless_open(
        s, "rampup-batch-size", s.has("rampup-batch-size") and ramp_start(s) is None),
    "ramp_start": ramp_start,
    "ramp_step": ramp(1),
}  # fmt: skip
"""Name of a value -> function that derives it from the arguments; None: unknown."""
