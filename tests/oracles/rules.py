"""Rules that degrees break, implemented without the table: plain branches for one launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def broken_ids(values: Mapping[str, int], *, sequence_parallel: bool) -> set[str]:
    """Return the ids of the general rules that a launch breaks."""
    return {*_grid(values), *_widths(values), *_sequence(values, sequence_parallel)}


def _grid(v: Mapping[str, int]) -> Iterator[str]:
    dense = v["tp"] * v["cp"] * v["pp"]
    if v["world"] // dense * dense != v["world"]:
        yield "grid.dense"
    else:
        ranks = v["world"] // dense
        samples = v["micro_batch"] * ranks
        if v["global_batch"] // samples * samples != v["global_batch"]:
            yield "batch.whole"
    expert = v["ep"] * v["etp"] * v["pp"]
    # one rank for all experts forms no separate grid
    if expert != v["pp"] and v["world"] // expert * expert != v["world"]:
        yield "grid.experts"
    stages = v["pp"] * v["vpp"]
    if v["layers"] // stages * stages != v["layers"]:
        yield "layers.even"


def _widths(v: Mapping[str, int]) -> Iterator[str]:
    tp = v["tp"]
    if any(v["heads"] * rank % tp for rank in range(1, tp)):
        yield "heads.tensor"
    copies = max(v["kv_heads"], tp) / min(v["kv_heads"], tp)
    if copies != int(copies):
        yield "kv-heads.copied"
    if v["ffn_hidden_size"] / tp != v["ffn_hidden_size"] // tp:
        yield "ffn.tensor"
    if not v["experts"]:
        if v["ep"] > 1:
            yield "experts.none"
        if v["etp"] > 1:
            yield "experts.none-etp"
    else:
        if v["experts"] not in range(0, v["experts"] + 1, v["ep"]):
            yield "experts.whole"
        if v["expert_width"] not in range(0, v["expert_width"] + 1, v["etp"]):
            yield "experts.width"


def _sequence(v: Mapping[str, int], sequence_parallel: bool) -> Iterator[str]:
    tensor = v["tp"] if sequence_parallel else 1
    # a ring has an early and a late piece per rank
    pieces = tensor if v["cp"] == 1 else 2 * v["cp"] * tensor
    if v["seq_length"] not in range(0, v["seq_length"] + 1, pieces):
        names = {(True, False): "sequence.context", (False, True): "sequence.tensor"}
        yield names.get((v["cp"] > 1, tensor > 1), "sequence.context-tensor")
