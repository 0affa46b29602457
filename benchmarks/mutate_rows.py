"""Mutations of the product, each aimed at one documented row: the row has to notice.

`python -m benchmarks.mutate_rows [WORD ...]` changes one text of a source file at a time, as it is
imported, and runs the check of the row (`tests/e2e/documented_*.py`) whose behaviour it breaks.
Files stay as they are. Words choose rows by their name. Exit code 1 if a mutation survives.
"""

from __future__ import annotations

import gc
import importlib.machinery
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np  # noqa: F401 - imported once, before the processes of the mutations

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 240
_SPACE = "search/planning/space.py"
_MODE = "profiler/plan/question.py"
_HARDWARE = "autopar/documents/hardware.py"
_MEMORY = "autopar/documents/memory.py"
_STRATEGY = "autopar/documents/strategy.py"
_SYSTEM = "search/closed_form/calculon/engine.py"
_ALIASES = "autopar/command/aliases.toml"


@dataclass(frozen=True)
class Mutation:
    """A text of one file that is replaced, and the row that must fail then."""

    row: str
    file: str
    old: str
    new: str


_DISABLED = (
    ("--disable_dp 1", "=options.disable_dp,", "=False,"),
    ("--disable_tp 1", " and not options.disable_tp:", ":"),
    ("--disable_vtp 1", "not options.disable_vtp and ", ""),
    ("--disable_pp 1", "options.disable_pp or ", ""),
    ("--disable_sdp 1", "preset.zero3 if not (z and options.disable_sdp)", "preset.zero3"),
    ("--disable_ckpt 1", " if not (c and options.disable_ckpt)", ""),
    ("--disable_tp_consec 1", " and not options.disable_tp_consec", ""),
    ("--disable_sp 1", " and not options.disable_sp:", ":"),
    ("--disable_cp 1", " and not options.disable_cp)", ")"),
    ("--disable_embedding_lmhead_tp 1", "else options.disable_embedding_lmhead_tp", "else False"),
    ("--disable_embedding_lmhead_sp 1", "options.disable_embedding_lmhead_sp\n", "False\n"),
)
_SPACES = (
    ("--search_space full", "_Preset(context=True)", "_Preset(zero3=(False,))"),
    ("--search_space 3d", "checkpoint=(False,), uniform=True", "checkpoint=(False,)"),
    ("--search_space dp+tp", '"dp+tp": _Preset(stages="one", ', '"dp+tp": _Preset('),
    ("--search_space dp+pp", '"dp+pp": _Preset(tensor="one", ', '"dp+pp": _Preset('),
    ("--search_space dp", '"dp": _Preset(stages="one", tensor="one", ', '"dp": _Preset('),
    ("--search_space sdp", "zero3=(True,)", "zero3=(False,)"),
    ("--search_space tp", 'tensor="largest"', 'tensor="one"'),
    ("--search_space pp", 'stages="largest"', 'stages="all"'),
    ("--sp_space tp", '"sp" in options.sp_space.split("+")', '"p" in options.sp_space'),
    ("--sp_space sp", '"tp" in options.sp_space.split("+")', '"p" in options.sp_space'),
    ("--sp_space tp+sp", '"sp" in options.sp_space.split("+")', 'options.sp_space == "sp"'),
    ("fine_grained_mode 0/1", " or not options.fine_grained_mode", ""),
    ("settle_bsz", "return (options.settle_bsz,)", "return (2 * options.settle_bsz,)"),
    ("settle_chunk", "[options.settle_chunk] if", "list(divisors(batch)) if"),
    ("min_bsz, max_bsz, bsz_scale", ", options.bsz_scale))", ", 2 * options.bsz_scale))"),
    ("default_dp_type ddp / zero2", "(options.default_dp_type,)", '("ddp",)'),
    ("--max_tp_deg", "options.max_sp_deg if ulysses else options.max_tp_deg", "options.max_sp_deg"),
    ("--max_pp_deg", "options.max_pp_deg or world_size", "world_size"),
    ("--max_sp_deg / --max_cp_deg", "most = options.max_cp_deg\n", "most = None\n"),
    ("dimension ckpt", "checkpoint=k,", "checkpoint=False,"),
    ("dimension sdp (ZeRO-3)", "zero3=z, checkpoint", "zero3=False, checkpoint"),
)
_GLOBAL = (
    ("GLOBAL pp_deg", "options.pp_deg or 1", "1"),
    ("GLOBAL global_tp_deg", "options.global_tp_deg or 1", "1"),
    ("GLOBAL global_tp_consec", "options.global_tp_consec is False", "False"),
    ("GLOBAL sdp", "bool(options.sdp)", "False"),
    ("GLOBAL global_train_batch_size", "h=options.global_train_batch_size", "h=16"),
    ("GLOBAL chunks", "options.chunks or stages", "stages"),
    ("GLOBAL global_checkpoint", "bool(options.global_checkpoint)", "False"),
    ("GLOBAL pipeline_type", 'options.pipeline_type or "gpipe"', '"gpipe"'),
    ("GLOBAL vocab_tp", "options.vocab_tp or 1", "1"),
)
_FILES = (
    ("key allreduce_size_{g}_consec_1", '!= "0"', '== "0"'),
    ("key allreduce_size_{g}_consec_0", '!= "0"', "is not None"),
    (
        "p2p_bandwidth file, key pp_size_{n}",
        'size: entry.value for entry in entries["p2p"]',
        'size: 9e9 for entry in entries["p2p"]',
    ),
    ("overlap_coefficient.json, overlap_coe", 'entries["overlap"][0].value', "1.15"),
    ("sp_time file: allreduce_size_{g}_{m}MB_time", '"ms": MS', '"ms": 2 * MS'),
    ("sp_time file: all2all_size_{g}_{m}MB_time", ") * MIB if", ") * GB if"),
    ("bus bandwidth unit (GB/s; Galvatron MiB/ms)", "MIB / MS", "float(GB)"),
    ("names for several nodes ({N}nodes_{G}gpus)", "nodes_{gpus_per_node}", "nodes_{num_nodes}"),
    (
        "allreduce_size_{g} without consec",
        "(entry.group_size, True), e",
        "(entry.group_size, 0), e",
    ),
    ("group_size keys 2..world, consec_0 omitted for world", "(world, False), one", "(0, 0), one"),
)
_TABLES = (
    ("memory: layertype_{t}, layertype_{t}_sp", '"_sp" if sequence_parallel', '"_sp" if True'),
    ("memory: parameter_size", "entry.parameter_size * MIB /", "entry.parameter_size * 1e6 /"),
    (
        "memory: tp_activation_per_bsz_dict with checkpoint,1,2,..",
        "else checkpoint * MIB",
        "else 3 * checkpoint * MIB",
    ),
    (
        "memory: model_states / activation by vocabulary tp",
        "_bytes(entry.activation.root)",
        "_bytes(entry.model_states.root)",
    ),
    ("memory: other_memory_pp_off[_sp]", '"off": "only", "on_first"', '"on_first": "only", "off"'),
    ("memory: other_memory_pp_on_first[_sp]", '"on_first": "first"', '"on_last": "first"'),
    ("memory: other_memory_pp_on_last[_sp]", '"on_last": "last"', '"on_first": "last"'),
    ("memory: sequence-length level", "seq = int(text) if", "seq = 2 * int(text) if"),
    ("without SP every tp has to be measured", '"_sp" if sequence_parallel', '"_sp" if True'),
)
_SYSTEMS = (
    ("system.matrix/vector tflops + efficiency", "tflops * 1e12", "tflops * 1e11"),
    ("system.mem1 GiB/GBps", "memory.GBps * 1e9", "memory.GBps * 1e8"),
    ("system.mem2 GiB/GBps", "system.memory_bytes(2)]", "system.memory_bytes(1)]"),
    ("system.processing_mode roofline/no_overlap", '== "roofline"', '!= "roofline"'),
    (
        "system.networks bandwidth/efficiency/latency/size/ops/must_be_filled/processor_usage",
        '"latency_s": network.latency',
        '"latency_s": 0.0',
    ),
)
_SPELLINGS = (
    ("hidden_size_list", "hidden-size-list ", ""),
    ("layer_num_list / layernum_list / layernum", "layer-num-list ", ""),
    ("seqlen_list", "seqlen-list ", ""),
    ("memory_upper_limit", "memory-upper-limit ", ""),
    ("max_tp_size, max_pp_size", "max-tp-size ", ""),
    ("PaddleNLP line verbatim", 'max-pp-deg = "max-pp-size"', 'max-pp-deg = "max-pp"'),
    ("--disable_fsdp 1", "disable-fsdp", "disable-nothing"),
    ("search_granularity coarse/fine", '0 = "coarse-grained", 1', '1 = "coarse-grained", 0'),
)
_PADDLENLP = (
    "optimum in PaddleNLP's own spelling (fine_grained_config.json), for train_qwen_fine_grained.sh"
)
_STRATEGIES = (
    (
        _PADDLENLP,
        "ulysses=self.usp_flag_list",
        "ulysses=self.recompute_list",
    ),
    ("coarse result optimal_solution.json", "checkpoint=(recompute,)", "checkpoint=(False,)"),
    ("old strategy files (v2.0-2.4)", "checkpoint=self.checkpoint", "checkpoint=()"),
)
MUTATIONS = (
    *(Mutation(row, _SPACE, old, new) for row, old, new in (*_DISABLED, *_SPACES)),
    *(Mutation(row, _MODE, old, new) for row, old, new in _GLOBAL),
    *(Mutation(row, _HARDWARE, old, new) for row, old, new in _FILES),
    *(Mutation(row, _MEMORY, old, new) for row, old, new in _TABLES),
    *(Mutation(row, _STRATEGY, old, new) for row, old, new in _STRATEGIES),
    *(Mutation(row, _SYSTEM, old, new) for row, old, new in _SYSTEMS),
    *(Mutation(row, _ALIASES, old, new) for row, old, new in _SPELLINGS),
)


def apply(mutation: Mutation) -> None:
    """Change what this process imports, or reads, of one file."""
    changed = str(ROOT / mutation.file)
    read, code = importlib.machinery.SourceFileLoader.get_data, Path.read_text

    def get_data(self: importlib.machinery.SourceFileLoader, path: str) -> bytes:
        name = str(path)
        if name == changed:
            return read(self, path).replace(mutation.old.encode(), mutation.new.encode())
        if name.endswith(".pyc") and Path(name).name.startswith(f"{Path(changed).stem}.cpython"):
            raise OSError  # compiled before the change
        return read(self, path)

    def read_text(self: Path, *given: str | None, **named: str | None) -> str:
        text = code(self, *given, **named)
        return text.replace(mutation.old, mutation.new) if str(self) == changed else text

    sys.dont_write_bytecode = True
    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign, assignment]
    Path.read_text = read_text  # type: ignore[method-assign, assignment]


def outcome(row: str, mutation: Mutation | None) -> str:
    """Run the check of a row in another process; return its error, "" if it passes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(_LIMIT_S)
        said = ""
        try:
            if mutation is not None:
                apply(mutation)
            _check(row)
        except BaseException as error:  # skips of pytest are among them
            said = traceback.format_exception_only(error)[-1].strip() or type(error).__name__
        os.write(writing, said[:2000].encode("utf-8", "backslashreplace"))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read().decode()
    _, status = os.waitpid(pid, 0)
    return said if status == 0 else said or f"ended by signal {os.WTERMSIG(status)}"


def _check(name: str) -> None:
    rows = import_module("tests.e2e.test_documented_workflows").ROWS
    (row,) = (row for row in rows if row.feature == name)
    prepare = import_module("tests.e2e.documented_lab").prepare
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # noqa: PTH123 - a device
    ):
        sys.stdout = nowhere
        row.check(prepare(Path(folder) / "lab"))


def main(words: list[str]) -> int:
    """Run the mutations of the rows that a word is part of; return the exit code."""
    for name in ("msgspec", "pytest", "typer", "rich.console", "yaml", "hypothesis"):
        import_module(name)
    gc.freeze()
    chosen = [m for m in MUTATIONS if not words or any(word in m.row for word in words)]
    survived = 0
    for mutation in chosen:
        if mutation.old not in (ROOT / mutation.file).read_text(encoding="utf-8"):
            print(f"STALE     {mutation.row}: {mutation.file} has no {mutation.old!r}", flush=True)
            survived += 1
            continue
        said = outcome(mutation.row, mutation)
        survived += not said
        head = said.splitlines()[0][:90] if said else ""
        print(f"{'killed  ' if said else 'SURVIVED'}  {mutation.row}: {head}", flush=True)
    print(f"{len(chosen)} mutations, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
