"""Command lines: profile the machine and the model, search, price a plan, run it."""

from __future__ import annotations

import math
from pathlib import Path

from autopar.verify.commands import Command
from autopar.verify.options import Device, VerifyOptions

__all__ = ["SMALL_MODEL", "Lines"]

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
"""The model where none is named: 5.3 million parameters, a step of 8 samples takes 0.2 s on two
CPU cores, so that a dozen plans three times take a few minutes, starts included."""

# Sizes and times of the profilers: enough for the messages and batches of a scaled-down model.
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
    """Writes the command lines of one verification.

    Parameters
    ----------
    device : what `options.device` is or turned out to be.
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
        """Return the quick measurement of the links; None where their files are given."""
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
        """Return the measurement of the model in batch mode; None where its files are given."""
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

        Twice as many alternatives: some do not run, and of ddp and ZeRO-2 without anything to shard
        one is left.
        """
        top = str(2 * self.options.plans)
        return self.search("best", ("--default-dp-type", "any", "--top", top))

    def search(self, name: str, extra: tuple[str, ...]) -> Command:
        """Return a search whose answer goes to `search/NAME.json`."""
        out = self.work / "search" / f"{name}.json"
        words = (*self._question(), *extra, "--json", str(out))
        return Command(
            name=f"search/{name}", title=f"searching: {name}", words=words, outputs=(out,)
        )

    def price(
        self, plan: Path, out: Path, name: str, title: str, calibration: Path | None = None
    ) -> Command:
        """Return the pricing of a strategy file; `out` then holds plan and prediction."""
        extra = () if calibration is None else ("--calibration", str(calibration))
        words = (*self._question(), *extra, "--evaluate", str(plan), "--json", str(out))
        return Command(name=name, title=title, words=words, outputs=(out,))

    def run(self, name: str, label: str, plan: Path, turn: int) -> Command:
        """Return the run of a plan in round `turn`, in real processes."""
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
            *("--output-config-path", "none"),
        )


def _powers(batch: int) -> list[int]:
    """Return 1, 2, 4, ... up to a batch, and the batch: what one rank may get of it."""
    return sorted({2**k for k in range(batch.bit_length()) if 2**k <= batch} | {batch})
