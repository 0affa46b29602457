"""The table of bad input: what is wrong, in which document or option, and the exit code.

`test_bad_input` runs every row in a folder that `prepare` fills with good files, and writes
`tests/golden/bad_input.md` from the answers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMANDS = ("autopar-search", "autopar-explain", "autopar-profile-estimate")
HARDWARE, MODEL = Path("hardware_configs") / "a100-80gb_1x8", Path("models") / "llama2-7b"
SHAPE = "1nodes_8gpus_per_node.json"

MEASURED = (
    *("--num-layers", "2", "--hidden-size", "4096", "--num-heads", "32", "--seq-length", "4096"),
    *("--time-profiling-path", "computation.json", "--memory-profiling-path", "memory.json"),
    *("--hardware", ".", "--sp-time-path", f"sp_time_{SHAPE}", "--global-batch-size", "8"),
)
ESTIMATED = ("--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--global-batch-size", "8")
EVALUATE = (*MEASURED, "--evaluate")

STRATEGY: dict[str, Any] = {
    "pp_deg": 2,
    "tp_sizes_enc": "2,2",
    "tp_consecutive_flags": "1,1",
    "dp_types_enc": "0,1",
    "use_sp": "0,0",
    "checkpoint": "0,1",
    "world_size": 8,
    "global_bsz": 8,
    "chunks": 2,
    "pp_division": "1,1",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "ddp",
    "vtp": 1,
    "vsp": 0,
    "embed_sdp": 0,
}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file, the command that reads it, and a number inside it to spoil."""

    title: str
    file: str
    arguments: tuple[str, ...]
    number: tuple[str | int, ...]
    """Keys that lead to the number."""
    required: str
    """A key (or the start of keys) without which the file says too little."""
    unit_error: float
    """A value that is right in another unit."""
    typo: str = "nonsense_key"
    command: str = COMMANDS[0]
    accepts: tuple[str, ...] = ()
    """Classes that are no error in this document."""


DOCUMENTS = (
    Document(
        title="all-reduce bandwidth",
        file=f"allreduce_bandwidth_{SHAPE}",
        arguments=MEASURED,
        number=("allreduce_size_4_consec_1",),
        required="allreduce_size_8_consec_1",
        unit_error=160445.0,
        typo="allreduce_size_4_concec_1",
    ),
    Document(
        title="point-to-point bandwidth",
        file=f"p2p_bandwidth_{SHAPE}",
        arguments=MEASURED,
        number=("pp_size_2",),
        required="pp_size_",
        unit_error=20.5e9,
        typo="pp_siz_2",
    ),
    Document(
        title="overlap coefficient",
        file="overlap_coefficient.json",
        arguments=MEASURED,
        number=("overlap_coe",),
        required="overlap_coe",
        unit_error=112.5,
        typo="overlap_coef",
    ),
    Document(
        title="collective times",
        file=f"sp_time_{SHAPE}",
        arguments=(*MEASURED, "--sp-space", "tp+sp"),
        number=("all2all_size_8_64MB_time",),
        required="all2all",
        unit_error=4e8,
        typo="all2all_size_8_64_time",
    ),
    Document(
        title="computation times",
        file="computation.json",
        arguments=MEASURED,
        number=("layertype_0_bsz1_seq4096",),
        required="layertype_other",
        unit_error=4e9,
        typo="layertype_0_bz1_seq4096",
    ),
    Document(
        title="memory",
        file="memory.json",
        arguments=MEASURED,
        number=("layertype_0_sp", "4096", "parameter_size"),
        required="other_memory_pp_off_sp",
        unit_error=48.0 * 2**20,
        typo="other_memory_pp_of_sp",
    ),
    Document(
        title="sidecar",
        file=f"allreduce_bandwidth_{SHAPE}.meta.json",
        arguments=MEASURED,
        number=("memory_bytes",),
        required="unit",
        unit_error=8e19,
        typo="memory_byte",
        accepts=("missing file", "null"),
    ),
    Document(
        title="strategy file",
        file="strategy.json",
        arguments=(*EVALUATE, "strategy.json"),
        number=("global_bsz",),
        required="tp_sizes_enc",
        unit_error=8.5,
        typo="global_bzs",
    ),
    Document(
        title="plan file",
        file="plan.json",
        arguments=("plan.json", *MEASURED),
        number=("plan", "pp_deg"),
        required="plan",
        unit_error=0.5,
        typo="",
        command=COMMANDS[1],
        accepts=("unknown key",),
    ),
    Document(
        title="model spec",
        file="spec.json",
        arguments=("--model", "spec.json", "--hardware", "h100:1x8", "--global-batch-size", "8"),
        number=("layers", 0, "hidden_size"),
        required="layers",
        unit_error=4096.5,
    ),
    Document(
        title="config.json of a model",
        file="config.json",
        arguments=("--model", "config.json", "--hardware", "h100:1x8", "--global-batch-size", "8"),
        number=("hidden_size",),
        required="hidden_size",
        unit_error=4096.5,
        accepts=("unknown key",),
    ),
    Document(
        title="device card",
        file="card.json",
        arguments=(
            "--model",
            "llama2-7b",
            "--hardware",
            "card.json:1x8",
            "--global-batch-size",
            "8",
        ),
        number=("device", "memory_bytes_per_s", "value"),
        required="device",
        unit_error=2039.0,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One bad input."""

    section: str
    what: str
    arguments: tuple[str, ...]
    code: int = 2
    command: str = COMMANDS[0]
    edit: Callable[[Path], None] | None = None
    """Spoils the folder."""
    prints: bool = False
    """True when the answer is found before the fault is met, and printed."""


def prepare(folder: Path, root: Path) -> None:
    """Fill a folder with good files of every kind, measured ones without sidecars but one."""
    for path in (root / HARDWARE).glob("*.json"):
        if not path.name.endswith(".meta.json"):
            shutil.copyfile(path, folder / path.name)
    sidecar = root / HARDWARE / DOCUMENTS[6].file
    shutil.copyfile(sidecar, folder / sidecar.name)
    for kind in ("computation", "memory"):
        (path,) = (
            p
            for p in (root / MODEL / "configs").glob(f"{kind}_profiling_bf16_*.json")
            if not p.name.endswith(".meta.json")
        )
        shutil.copyfile(path, folder / f"{kind}.json")
    shutil.copyfile(root / MODEL / "model.json", folder / "spec.json")
    shutil.copyfile(root / "hardware_configs" / "cards" / "a100-80gb.json", folder / "card.json")
    write(folder / "strategy.json", STRATEGY)
    write(folder / "plan.json", {"format": "autopar-plan", "version": 1, "plan": STRATEGY})
    for name in ("run_v2.json", "launch_v1.json"):
        shutil.copyfile(root / "tests" / "data" / name, folder / name)
    write(folder / "config.json", CONFIG)


def case_of(
    command: str,
    section: str,
    what: str,
    arguments: tuple[str, ...],
    edit: Callable[[Path], None] | None = None,
    *,
    code: int = 2,
) -> Case:
    """Return a row of a command."""
    return Case(
        section=section, what=what, arguments=arguments, edit=edit, code=code, command=command
    )


def write(path: Path, data: object) -> None:
    """Write JSON, NaN and infinities included."""
    path.write_text(json.dumps(data, indent=4), encoding="utf-8")


def changed(file: str, keys: tuple[str | int, ...], value: object) -> Callable[[Path], None]:
    """Return an edit that sets one value of a file."""

    def edit(folder: Path) -> None:
        data = json.loads((folder / file).read_text(encoding="utf-8"))
        node = data
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value
        write(folder / file, data)

    return edit


def _dropped(file: str, start: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / file).read_text(encoding="utf-8"))
        kept = {key: value for key, value in data.items() if not key.startswith(start)}
        assert len(kept) < len(data)
        write(folder / file, kept)

    return edit


def _bytes(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return edit


def _directory(file: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return edit


def _twice(raw: bytes) -> bytes:
    first = raw.split(b'"')[1]
    return raw.replace(b'"' + first + b'"', b'"' + first + b'": 1, "' + first + b'"', 1)


def _document_cases(document: Document) -> Iterator[Case]:
    file, number = document.file, document.number
    edits: Mapping[str, Callable[[Path], None]] = {
        "missing file": lambda folder: (folder / file).unlink(),
        "a directory": _directory(file),
        "empty": _bytes(file, lambda raw: b""),
        "truncated": _bytes(file, lambda raw: raw[:-9]),
        "no JSON": _bytes(file, lambda raw: b"pp_size_2 = 3"),
        "not UTF-8": _bytes(file, lambda raw: b'{"a\xff": 1}'),
        "a list": _bytes(file, lambda raw: b"[1, 2]"),
        "a key twice": _bytes(file, _twice),
        "text for a number": changed(file, number, "12 GB"),
        "a boolean": changed(file, number, True),
        "null": changed(file, number, None),
        "an object": changed(file, number, {"a": 1}),
        "NaN": changed(file, number, float("nan")),
        "infinity": changed(file, number, float("inf")),
        "negative": changed(file, number, -3),
        "zero": changed(file, number, 0),
        "another unit": changed(file, number, document.unit_error),
        "unknown key": changed(file, (document.typo or "nonsense_key",), 1.0),
        "missing key": _dropped(file, document.required),
    }
    for what, edit in edits.items():
        if what not in document.accepts:
            yield Case(
                section=document.title,
                what=what,
                arguments=document.arguments,
                command=document.command,
                edit=edit,
            )


def _strategy(what: str, **values: object) -> Case:
    def edit(folder: Path) -> None:
        write(folder / "strategy.json", {**STRATEGY, **values})

    return Case(
        section="strategy file",
        what=what,
        arguments=(*EVALUATE, "strategy.json"),
        edit=edit,
    )


def _option(what: str, *arguments: str, code: int = 2, base: tuple[str, ...] = ESTIMATED) -> Case:
    return Case(section="options", what=what, arguments=(*base, *arguments), code=code)


SPECIAL = (
    _strategy("another world size", world_size=16),
    _strategy("other layers", tp_sizes_enc="2,2,2", pp_division="2,1", tp_consecutive_flags="1,1,1",
              dp_types_enc="0,0,0", use_sp="0,0,0", checkpoint="0,0,0"),
    _strategy("pp_division does not sum", pp_division="1,2"),
    _strategy("pp_division too short", pp_division="2"),
    _strategy("lists of unequal length", checkpoint="0,1,1"),
    _strategy("unknown schedule", pipeline_type="zigzag"),
    _strategy("degree 0", tp_sizes_enc="2,0"),
    _strategy("two ZeRO-3 decisions", vocab_sdp=1),
    _strategy("expert degrees", ep_sizes_enc="2,2"),
    Case(
        section="plan file",
        what="a newer version",
        arguments=("plan.json", *MEASURED),
        command=COMMANDS[1],
        edit=changed("plan.json", ("version",), 99),
    ),
    *(
        Case(
            section="plan file",
            what=what,
            arguments=("plan.json", *MEASURED),
            command=COMMANDS[1],
            edit=changed("plan.json", ("request",), request),
        )
        for what, request in {
            "a damaged request": {"min-bsz": 16},
            "a request that is a list": [],
            "a flag for a number in a request": {"min-bsz": True},
            "an unknown option in a request": {"nonsense": "1"},
            "a pin that is none in a request": {"pin": ["tp"]},
        }.items()
    ),
    *(
        Case(
            section="plan file",
            what=what,
            arguments=("--evaluate", name),
            command=COMMANDS[0],
            edit=changed(name, keys, value),
        )
        for what, name, keys, value in (
            ("degree 0 of a uniform plan", "run_v2.json",
             ("strategy", "layers", 0, "split", "cp"), 0),
            ("a uniform plan of another length than its request", "run_v2.json",
             ("seq_length",), 2048),
            ("a uniform plan of no trainer", "run_v2.json", ("runtime", "engine"), "horovod"),
            ("degree 0 of an older uniform plan", "launch_v1.json",
             ("launch", "degrees", "cp"), 0),
            ("another recomputation of an older uniform plan", "launch_v1.json",
             ("launch", "degrees", "recompute"), "everything"),
        )
    ),
    Case(
        section="plan file",
        what="nonsense after --why-not",
        arguments=("plan.json", *MEASURED, "--why-not", "tp>8"),
        command=COMMANDS[1],
    ),
    Case(section="plan file", what="no file named", arguments=MEASURED, command=COMMANDS[1]),
    Case(
        section="model spec",
        what="zero layers",
        arguments=DOCUMENTS[9].arguments,
        edit=changed("spec.json", ("layers", 0, "num_layers"), 0),
    ),
    Case(
        section="model spec",
        what="heads do not divide the hidden size",
        arguments=DOCUMENTS[9].arguments,
        edit=changed("spec.json", ("layers",), [
            {"num_layers": 2, "seq_length": 128, "hidden_size": 1000, "num_heads": 7,
             "ffn_hidden_size": 4000}
        ]),
    ),
    Case(
        section="config.json of a model",
        what="heads do not divide the hidden size",
        arguments=DOCUMENTS[10].arguments,
        edit=changed("config.json", ("num_attention_heads",), 7),
    ),
    Case(
        section="config.json of a model",
        what="another architecture",
        arguments=DOCUMENTS[10].arguments,
        edit=changed("config.json", ("model_type",), "resnet"),
    ),
)  # fmt: skip

OPTIONS = (
    _option("unknown option", "--memory-constrain", "40"),
    _option("an option twice", "--tp", "2", "--tp", "4"),
    _option("an option twice in other words", "--settle-bsz", "16", base=ESTIMATED),
    _option("GPUs of a node or in all", "--num-gpus", "64"),
    _option("a card without a shape", "--hardware", "h100"),
    _option("a card and GPUs that fill no nodes", "--hardware", "h100", "--gpus", "12"),
    _option("a memory in MiB", "--memory-constraint", "81920"),
    _option("a degree of a launcher that nothing here has", "--vocab_tp", "4"),
    _option("no value", "--micro-batches"),
    _option("a number for a flag", "--fine-grained-mode", "2"),
    _option("a stray word", "stray"),
    _option("a model without its option", "llama3-8b"),
    _option("a cluster without its option", "h100:1x8"),
    _option("a text for a number", "--memory-constraint", "24GB"),
    _option("NaN", "--memory-constraint", "nan"),
    _option("zero budget", "--memory-constraint", "0"),
    _option("negative budget", "--memory-constraint", "-1"),
    _option("beyond any device", "--memory-constraint", "24e9"),
    _option("beyond any unit", "--memory-constraint", "1e30"),
    _option("budget too small", "--memory-constraint", "3", "--engine", "none", code=3),
    _option("negative batch", "--min-bsz", "-8", base=ESTIMATED[:4]),
    _option("batch of half a sample", "--global-batch-size", "8.5"),
    _option("empty batch range", "--min-bsz", "64", "--max-bsz", "8", base=ESTIMATED[:4]),
    _option("batch that no plan splits", "--global-batch-size", "3", "--disable-tp",
            "--disable-pp"),
    _option("micro-batches do not divide", "--micro-batches", "3"),
    _option("zero micro-batches", "--micro-batches", "0"),
    _option("zero layers", "--num-layers", "0"),
    _option("layers of two types for one", "--num-layers", "12,12"),
    _option("heads that no degree divides", "--num-heads", "7", "--head-dim", "128", "--disable-dp",
            "--disable-pp", code=3),
    _option("illegal degree", "--max-tp-deg", "0"),
    _option("unknown search space", "--search-space", "4d"),
    _option("search space without a plan", "--search-space", "sdp", code=3,
            base=("--model", "gpt2-xl", "--hardware", "h100:1x1")),
    _option("search space that the heads rule out", "--search-space", "tp", code=3,
            base=("--model", "gpt2-xl", "--hardware", "h100:1x8")),
    _option("unknown precision", "--mixed-precision", "fp8"),
    _option("pp-division does not sum", "--pp-division", "9,9"),
    _option("pp-division with zero", "--pp-division", "32,0"),
    _option("pp-division against --max-pp-deg", "--pp-division", "16,16", "--max-pp-deg", "1"),
    _option("pin: unknown key", "--pin", "color=3"),
    _option("pin: no rule", "--pin", "fast please"),
    _option("pin: layer out of range", "--pin", "layers 0-99:tp=2"),
    _option("pin: no number of stages", "--pin", "pp=3"),
    _option("pin: impossible degree", "--pin", "tp=3", code=3),
    _option("pins that exclude each other", "--pin", "tp=2", "--pin", "tp=4", code=3),
    _option("a degree that does not divide the heads", "--tp", "6"),
    _option("degrees beyond the GPUs", "--tp", "4", "--pp", "4"),
    _option("experts of a model without", "--ep", "8"),
    _option("chunks without stages", "--vpp", "2", "--pp", "1"),
    _option("8 bits on a card without", "--precision", "fp8"),
    _option("unknown module", "--recompute", "attention"),
    _option("unknown schedule", "--schedule", "zvb"),
    _option("program of other plans", "--engine", "ms-swift"),
    _option("chunks of plans whose layers differ", "--vpp", "2", "--pin", "tp=2"),
    _option("everything disabled", "--disable-dp", "--disable-tp", "--disable-pp", code=3),
    _option("zero nodes", base=("--hardware", "h100:0x8", *ESTIMATED[:2])),
    _option("no GPUs per node", base=("--hardware", "h100:4", *ESTIMATED[:2])),
    _option("unknown card", base=("--hardware", "h1000:1x8", *ESTIMATED[:2])),
    _option("more GPUs than a node holds", base=("--hardware", "h100:1x16", *ESTIMATED[:2])),
    _option("two cluster sizes", "--num-nodes", "3"),
    _option("estimated and measured hardware", "--p2p-bandwidth-config-path", "."),
    _option("unknown hardware", base=("--hardware", "nowhere", *ESTIMATED[:2])),
    _option("unknown model", base=("--model", "llama9-7b", *ESTIMATED[2:])),
    _option("half a profile", base=(*ESTIMATED[2:], "--time-profiling-path", "computation.json")),
    _option("measured model, no hardware", base=MEASURED[:12]),
    _option("model sizes missing", base=(*MEASURED[2:],)),
    _option("sizes do not multiply", "--world-size", "12", "--num-nodes", "5", base=MEASURED),
    _option("unknown bandwidth unit", "--bandwidth-unit", "Gb/s", base=MEASURED),
    _option("sequence that was not measured", "--seq-length", "2048", base=MEASURED),
    _option("sequence far beyond the measured", "--seq-length", "1000000",
            "--time-profile-mode", "sequence", "--memory-profile-mode", "sequence", base=MEASURED),
    _option("negative alternatives", "--top", "-1"),
    _option("threads", "--threads", "2"),
    _option("site of another card", "--hardware", "h100:1x8", "--site", "selene-a100"),
    _option("no time", "--time-limit", "0"),
    _option("reserve above 1", "--reserve", "5"),
    _option("reserve above 100 %", "--reserve", "150%"),
    _option("a gap of plans whose layers differ", "--gap", "0.1%", "--pin", "tp=2"),
    _option("a rate of no goal", "--tokens-per-s", "5"),
    _option("a goal of a plan that is given", "--goal", "cost", "--evaluate", "strategy.json"),
    _option("a goal of plans whose layers differ", "--goal", "fewest-gpus", "--pin", "tp=2"),
    _option("a part of plans whose layers differ", "--use", "up-to", "--pin", "tp=2"),
    _option("a part of a plan that is given", "--use", "4", "--evaluate", "strategy.json"),
    _option("GPUs that no part has", "--use", "7"),
    _option("a part that is no number", "--use", "half"),
)  # fmt: skip


def _more() -> Iterator[Case]:
    yield Case(
        section="options",
        what="tp+sp without collective times",
        arguments=(*MEASURED[:14], "--global-batch-size", "8", "--sp-space", "tp+sp"),
        edit=lambda folder: (folder / f"sp_time_{SHAPE}").unlink(),
    )
    for what, option, path in (
        ("strategy file not writable", "--output-config-path", "spec.json/plans"),
        ("JSON not writable", "--json", "spec.json/answer.json"),
    ):
        plans = (*ESTIMATED, "--engine", "none", option, path)
        yield Case(section="options", what=what, arguments=plans, prints=True)
    good = ("--model", "llama2-7b", "--hardware", "h100:1x8", "--out", "estimated")
    for what, arguments in (
        ("nothing named", ()),
        ("unknown model", ("--model", "llama9-7b", *good[2:])),
        ("unknown card", (*good, "--hardware", "h1000:1x8")),
        ("no cluster", (*good, "--hardware", "h100")),
        ("unknown precision", (*good, "--precision", "fp8")),
        ("no sequence length", (*good, "--seq-length", "long")),
        ("zero batches", (*good, "--max-batch", "0")),
        ("unknown kernels", (*good, "--kernels", "magic")),
        ("a stack, and other kernels", (*good, "--stack", "megatron-core", "--kernels", "eager")),
        ("a site of another card", (*good, "--site", "selene-a100")),
        ("unknown option", (*good, "--memory-constraint", "3")),
        ("folder not writable", (*good, "--out", "spec.json/estimated")),
    ):
        yield Case(
            section="options of autopar-profile-estimate",
            what=what,
            arguments=arguments,
            command=COMMANDS[2],
        )


def cases() -> tuple[Case, ...]:
    """Return every row of the table, by section."""
    found = [case for document in DOCUMENTS for case in _document_cases(document)]
    found += [*SPECIAL, *OPTIONS, *_more()]
    order = list(dict.fromkeys(case.section for case in found))
    return tuple(sorted(found, key=lambda case: order.index(case.section)))
