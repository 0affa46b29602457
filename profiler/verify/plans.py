"""Selection of the plans to run: the best plans of the search, and contrasting plans.

The best plans alone are about equally fast, and their order is noise. Contrasting plans are
therefore added. Each is the fastest plan that obeys one rule of a table: other degrees, sharding,
recomputation, stages or micro-batches. They keep the order of the table and duplicates count once.
Rules that no plan obeys here (odd heads, one rank) are skipped with a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from autopar.documents.json import load_object, write_json
from autopar.documents.plan import PlanDocument, read_strategy
from autopar.documents.strategy import strategy_document
from autopar.records import Record, replace
from autopar.run.plan import LayerStrategy, Plan
from profiler.verify.compare import read_priced
from profiler.verify.folder import Command, CommandError, Device, Folder, VerifyOptions

# --------------------------------------------------------------------------------------------------
# Command lines: profile the machine and the model, search, price a plan, run it.


SMALL_MODEL = {
    "format": "autopar-model",
    "version": 1,
    "name": "verify-small",
    "source": "made for autopar-verify: small enough for a CPU, with every part of a llama",
    "layers": [
        {
            "num_layers": 4,
            "seq_length": 128,
            "hidden_size": 256,
            "num_heads": 8,
            "num_kv_heads": 8,
            "ffn_hidden_size": 704,
            "gated_mlp": True,
        }
    ],
    "vocab_size": 4096,
}
"""Default model: 5.3 million parameters. A step of 8 samples takes 0.2 s on two CPU cores, so a
dozen plans run three times take a few minutes, starts included."""

# Sizes and times of the profilers, sufficient for messages and batches of a scaled-down model.
_LINKS: dict[Device, tuple[str, ...]] = {
    "cpu": (
        *("--sizes", "16K:16M:x4", "--reference-size", "4M"),
        *("--max-seconds", "0.5", "--iters", "30", "--warmup", "3"),
    ),
    "cuda": (
        *("--sizes", "64K:256M:x4", "--reference-size", "16M"),
        *("--max-seconds", "1", "--iters", "30", "--warmup", "5"),
    ),
}
_LAYERS = ("--max-seconds", "0.5", "--iters", "20", "--warmup", "2")


class Lines:
    """Command lines of one verification.

    device : device in use, after `auto` is resolved.
    """

    def __init__(self, options: VerifyOptions, device: Device) -> None:
        self.options = options
        self.device = device
        self.work = options.work
        self.precision = options.precision or ("bf16" if device == "cuda" else "fp32")
        self.model = options.model or str(self.work / "model.json")
        self.hardware = options.hardware or str(self.work / "hardware")
        self.profiles = options.profiles or str(self.work / "model")
        self._backend = "nccl" if device == "cuda" else "gloo"

    def profile_hardware(self) -> Command | None:
        """Return the quick measurement of the links; None if hardware files are given."""
        if self.options.hardware is not None:
            return None
        words = (
            *self._torchrun("profiler.hardware"),
            *("--backend", self._backend),
            *_LINKS[self.device],
            *("--out", self.hardware, "--resume"),
        )
        return Command(
            name="hardware",
            title="measuring the links",
            words=words,
            outputs=(Path(self.hardware),),
        )

    def profile_model(self) -> Command | None:
        """Return the measurement of the model in batch mode; None if profile files are given."""
        if self.options.profiles is not None:
            return None
        words = (
            *("profile-model", "--model", self.model, "--mode", "batch"),
            *("--bsz", ",".join(map(str, _powers(self.options.batch)))),
            *(() if self.options.seq_length is None else ("--seq", str(self.options.seq_length))),
            *("--max-tp-deg", str(2 ** int(math.log2(self.options.nproc)))),
            *("--device", self.device, "--dtype", self.precision),
            *_LAYERS,
            *("--out", self.profiles, "--resume"),
        )
        return Command(
            name="model", title="measuring the model", words=words, outputs=(Path(self.profiles),)
        )

    def best(self) -> Command:
        """Return the search for the best plans.

        It asks for twice as many alternatives as needed: some do not run, and ddp and ZeRO-2 plans
        are equal if there is nothing to shard.
        """
        top = str(2 * self.options.plans)
        return self.search("best", ("--default-dp-type", "any", "--top", top))

    def search(self, name: str, extra: tuple[str, ...]) -> Command:
        """Return a search that writes `search/NAME.json`."""
        out = self.work / "search" / f"{name}.json"
        words = (*self._question(), *extra, "--json", str(out))
        return Command(
            name=f"search/{name}", title=f"searching: {name}", words=words, outputs=(out,)
        )

    def price(
        self, plan: Path, out: Path, name: str, title: str, calibration: Path | None = None
    ) -> Command:
        """Return the pricing of a strategy file; `out` receives plan and prediction."""
        extra = () if calibration is None else ("--calibration", str(calibration))
        words = (*self._question(), *extra, "--evaluate", str(plan), "--json", str(out))
        return Command(name=name, title=title, words=words, outputs=(out,))

    def run(self, name: str, label: str, plan: Path, turn: int) -> Command:
        """Return the run of a plan in round `turn`, with real processes."""
        out = self.work / "runs" / f"{name}.{turn}.json"
        options = self.options
        words = (
            *self._torchrun("profiler.plan"),
            *(str(plan), "--model", self.model),
            *(() if options.layers is None else ("--num-layers", options.layers)),
            *(() if options.seq_length is None else ("--seq", str(options.seq_length))),
            *("--mode", "run", "--no-reference", "--timed-steps", str(options.steps)),
            *("--backend", self._backend, "--mixed-precision", self.precision),
            *("--json", str(out)),
        )
        title = f"round {turn + 1} of {options.repeats}: running {label}"
        return Command(name=f"runs/{name}.{turn}", title=title, words=words, outputs=(out,))

    def _torchrun(self, module: str) -> tuple[str, ...]:
        ranks = str(self.options.nproc)
        return ("torchrun", "--standalone", "--nproc-per-node", ranks, "-m", module)

    def _question(self) -> tuple[str, ...]:
        options = self.options
        memory = options.memory_constraint
        return (
            *("autopar-search", "--model", self.model, "--hardware", self.hardware),
            *("--memory-profiling-path", self.profiles, "--time-profiling-path", self.profiles),
            *("--mixed-precision", self.precision, "--time-profile-mode", "batch"),
            *("--num-nodes", "1", "--num-gpus-per-node", str(options.nproc)),
            *("--settle-bsz", str(options.batch)),
            *(() if options.layers is None else ("--num-layers", options.layers)),
            *(() if options.seq_length is None else ("--seq-length", str(options.seq_length))),
            *(() if memory is None else ("--memory-constraint", f"{memory:g}")),
            # The plan is written to --json only.
            *("--output-config-path", "none"),
        )


def _powers(batch: int) -> list[int]:
    """Return 1, 2, 4, ... up to `batch`, and `batch`: the possible samples of a rank."""
    return sorted({2**k for k in range(batch.bit_length()) if 2**k <= batch} | {batch})


# --------------------------------------------------------------------------------------------------
# Selection: the best plans, and plans that differ from them in one way.


class Contrast(Record):
    """Rule for a plan: search options whose result is the fastest plan that obeys the rule."""

    name: str
    why: str
    extra: tuple[str, ...]


class Candidate(Record):
    """A plan to be run, with its prediction in a file."""

    name: str
    chosen: str
    """Reason for running it, for display."""
    plan: Plan
    path: Path
    """File of plan and prediction, as written by `autopar-search --evaluate --json`."""
    label: str


def contrasts(options: VerifyOptions, num_layers: int) -> Iterator[Contrast]:
    """Yield the rules in the order in which they are tried."""
    ranks, batch, half = options.nproc, options.batch, num_layers // 2
    one, two, four = (("--settle-chunk", str(count)) for count in (1, 2, 4))
    single = ("--settle-chunk", str(batch // ranks))
    plain = "tp=1,zero3=0,ckpt=0"
    mixed = (
        f"layers 0-{half - 1}:tp={ranks}",
        *one,
        "--pin",
        f"layers {half}-{num_layers - 1}:tp=1",
    )
    several, splits = ranks > 1, batch // ranks > 1
    rows: tuple[tuple[bool, str, str, tuple[str, ...]], ...] = (
        (several, "tp", "tensor parallel", (f"pp=1,tp={ranks},ulysses=0,zero3=0,ckpt=0", *one)),
        (
            several,
            "pp-whole",
            "two stages, one micro-batch",
            ("pp=2,ckpt=0", *one, "--pipeline-type", "gpipe"),
        ),
        (several, "zero3-ckpt", "ZeRO-3, recomputed", ("pp=1,tp=1,zero3=1,ckpt=1", *one)),
        (True, "ckpt", "recomputed", ("pp=1,tp=1,zero3=0,ckpt=1", *one)),
        (several, "ulysses", "Ulysses", (f"pp=1,tp={ranks},ulysses=1,ckpt=0", *one)),
        (
            several and num_layers > 1,
            "mixed",
            "tensor parallel layers, then data parallel ones",
            (*mixed, "--pin", "pp=1"),
        ),
        (several, "pp-halves", "two stages, two micro-batches", ("pp=2,ckpt=0", *two)),
        (splits, "chunks", "micro-batches of one sample per rank", (f"pp=1,{plain}", *single)),
        (several, "zero3", "ZeRO-3", ("pp=1,tp=1,zero3=1,ckpt=0", *one)),
        (several, "zero2", "ZeRO-2", (f"pp=1,{plain}", *one)),
        (
            several,
            "tp-ckpt",
            "tensor parallel, recomputed",
            (f"pp=1,tp={ranks},ulysses=0,zero3=0,ckpt=1", *one),
        ),
        (
            several and batch % 4 == 0 and batch // 4 >= ranks // 2,
            "pp-quarters",
            "two stages, four micro-batches",
            ("pp=2,ckpt=0", *four),
        ),
        (
            splits,
            "ckpt-chunks",
            "recomputed, micro-batches of one sample per rank",
            ("pp=1,tp=1,zero3=0,ckpt=1", *single),
        ),
        (batch % (2 * ranks) == 0, "halves", "two micro-batches", (f"pp=1,{plain}", *two)),
    )
    # Options that widen the default search space.
    widened = {"ulysses": ("--sp-space", "tp+sp"), "zero2": ("--default-dp-type", "zero2")}
    for is_here, name, why, pinned in rows:
        if is_here:
            yield Contrast(name=name, why=why, extra=(*widened.get(name, ()), "--pin", *pinned))


def choose_plans(
    options: VerifyOptions, lines: Lines, folder: Folder, notes: list[str]
) -> list[Candidate]:
    """Return the plans to run, searched and priced; `notes` receives the rules without a plan.

    Raises CommandError: the search itself fails.
    """
    best = lines.best()
    folder.run(best)
    found = PlanDocument.read(best.outputs[0])
    world = options.nproc
    kept: dict[Plan, tuple[str, str]] = {}
    answer = read_strategy(found, world_size=world, path=best.outputs[0])
    others = (read_strategy(other.plan, world_size=world) for other in found.alternatives)
    for place, plan in enumerate(map(plain_plan, (answer, *others))):
        if len(kept) < options.plans and _runs(plan):
            why = "the best" if not place else f"alternative {place} of the search"
            kept.setdefault(plan, (f"best{place}" if place else "best", why))
    # In addition to the best plans, however many of them run.
    wanted = len(kept) + options.contrast
    for contrast in contrasts(options, len(answer.layers)):
        if len(kept) >= wanted:
            break
        command = lines.search(contrast.name, ("--top", "0", *contrast.extra))
        try:
            folder.run(command)
        except CommandError as error:
            # 2: the rule is not applicable here, 3: no plan obeys it.
            if error.exit_code not in (2, 3):
                raise
            notes.append(f"no plan for contrast {contrast.name!r}: {error.sentence}")
            continue
        plan = plain_plan(read_strategy(command.outputs[0], world_size=world))
        if _runs(plan):
            kept.setdefault(plan, (contrast.name, f"contrast: {contrast.why}"))
    return [priced(plan, *names, lines, folder) for plan, names in kept.items()]


def plain_plan(plan: Plan) -> Plan:
    """Return the plan without settings that have no effect, so that equal plans compare equal.

    These settings are ZeRO without anything to shard (a tensor group of all ranks), strided groups
    of one or of all ranks, Ulysses of degree 1, and GPipe with one stage and one micro-batch.
    """
    ranks = plan.world_size // plan.num_stages
    vocab = plan.vocab
    found = replace(
        plan,
        layers=tuple(_plain_layer(layer, ranks) for layer in plan.layers),
        vocab=replace(
            vocab,
            ulysses=vocab.ulysses and vocab.tp > 1,
            zero3=vocab.zero3 and _holds_alike(vocab.tp, vocab.ulysses, ranks),
        ),
    )
    if found.num_stages == found.num_microbatches == 1:
        found = replace(found, pipeline_type="1f1b")
    return found if _shards(found) else replace(found, default_dp_type="ddp")


def _plain_layer(layer: LayerStrategy, ranks: int) -> LayerStrategy:
    return replace(
        layer,
        ulysses=layer.ulysses and layer.tp > 1,
        strided=layer.strided and 1 < layer.tp < ranks,
        zero3=layer.zero3 and _holds_alike(layer.tp, layer.ulysses, ranks),
    )


def _holds_alike(tp: int, ulysses: bool, ranks: int) -> bool:
    """Return True if several ranks of a stage hold equal weights, which ZeRO can shard."""
    return ranks > 1 and (ulysses or tp < ranks)


def _shards(plan: Plan) -> bool:
    """Return True if ZeRO-2 has anything to shard."""
    if plan.default_dp_type == "ddp":
        return False
    ranks = plan.world_size // plan.num_stages
    held = [(s.tp, s.ulysses, s.zero3) for s in plan.layers]
    held.append((plan.vocab.tp, plan.vocab.ulysses, plan.vocab.zero3))
    return any(not zero3 and _holds_alike(tp, ulysses, ranks) for tp, ulysses, zero3 in held)


def _runs(plan: Plan) -> bool:
    """Return True if the executor can run the plan: 1F1B needs a micro-batch per stage."""
    return plan.pipeline_type == "gpipe" or plan.num_microbatches >= plan.num_stages


def priced(plan: Plan, name: str, chosen: str, lines: Lines, folder: Folder) -> Candidate:
    """Return a priced plan; files of another plan under its name are deleted.

    Raises CommandError: pricing fails. Raises DocumentError: the document has no step time.
    """
    strategy = lines.work / "plans" / f"{name}.strategy.json"
    out = lines.work / "plans" / f"{name}.json"
    document = strategy_document(plan)
    if not strategy.is_file() or load_object(strategy).data != document:
        write_json(strategy, document)
        out.unlink(missing_ok=True)  # belongs to another plan under this name
        for pattern in (f"runs/{name}.*.json", f"probes/*/{name}.json"):
            for stale in list(lines.work.glob(pattern)):
                stale.unlink()
    label = describe(plan)
    folder.run(lines.price(strategy, out, f"plans/{name}", f"pricing {label}"))
    read_priced(out)
    return Candidate(name=name, chosen=chosen, plan=plan, path=out, label=label)


def describe(plan: Plan) -> str:
    """Return a short label of a plan, such as `dp2 m4`, `2 x tp2, 2 x dp2` or `pp2 m2`."""
    ranks = plan.world_size // plan.num_stages
    words = [f"pp{plan.num_stages}"] if plan.num_stages > 1 else []
    if plan.num_stages > 1 and plan.pipeline_type == "gpipe":
        words.append("gpipe")
    runs = [(key, len(list(group))) for key, group in groupby(plan.layers)]
    labels = [
        # A data-parallel degree of 1 is omitted.
        s.label(ranks // (s.tp * s.cp), plan.default_dp_type).removeprefix("dp1").removeprefix("-")
        for s, _ in runs
    ]
    if len(runs) == 1:
        words += [labels[0]] if labels[0] else []
    else:
        words.append(
            ", ".join(f"{n} x {label}" for (_, n), label in zip(runs, labels, strict=True))
        )
    if plan.num_microbatches > 1:
        words.append(f"m{plan.num_microbatches}")
    vocab = plan.vocab
    if vocab.tp > 1:
        words.append(f"{'vsp' if vocab.ulysses else 'vtp'}{vocab.tp}")
    if vocab.zero3:
        words.append("vzero3")
    elif _shards(plan) and _holds_alike(vocab.tp, vocab.ulysses, ranks):
        words.append("vzero2")
    return " ".join(words) or "one rank"
