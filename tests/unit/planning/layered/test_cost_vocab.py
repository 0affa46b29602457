"""Embedding, head and loss: time and memory by position in the pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.records import replace
from autopar.run.model import LayerProfile, ModelSpec, OtherMemory
from autopar.run.plan import PipelineType, VocabStrategy
from search.planning.cost.model import CostModel
from search.planning.cost.vocabulary import VocabRows
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec

BUS = 100e9
K = 1.2
TOKENS = 1024 * 512 * 2.0
ONLY, FIRST, LAST = range(3)


def rows(
    strategy: VocabStrategy,
    *,
    samples: int = 16,
    stages: int = 1,
    default: Any = "ddp",
    spec: Any = None,
    model: Any = None,
    hardware: Any = None,
    **options: Any,
) -> VocabRows:
    """Return the rows of one embedding strategy in one table."""
    # the numbers below are of the recipe 2 + 2 + 12
    base = {"time_profile_mode": "batch", "fp32_gradients": False}
    settings = SearchOptions(**{**base, **options})
    cost = CostModel(
        spec or toy_spec(),
        model or toy_model(sequence_parallel=settings.sequence_parallel),
        hardware or toy_hardware(),
        settings,
    )
    found = cost.vocab_rows([strategy], [(stages, samples, default)])
    assert found.valid[0, 0]
    return found


def gather(num_bytes: float, size: int) -> float:
    """Return an all-gather or reduce-scatter in one node."""
    return (size - 1) / size * num_bytes / BUS


def overlap(x: float, y: float) -> float:
    """Return the formula in plain numbers."""
    return min(K * min(x, y) + abs(x - y), x + y)


def test_only_stage() -> None:
    """b_v = 2: 0.5 + 2 ms forward, twice that backward; N = states / 16 is reduced over 8."""
    found = rows(VocabStrategy())
    sync = 2 * gather(2 * 1e6, 8)

    assert found.forward["forward"][0, ONLY, 0] == pytest.approx(2.5e-3)
    assert found.backward["backward"][0, ONLY, 0] == pytest.approx(5e-3)
    assert found.step["tail"][0, ONLY, 0] == pytest.approx(overlap(5e-3, sync) - 5e-3)
    assert found.step["optimizer"][0, ONLY, 0] == pytest.approx(26e6 / 1e12)
    assert not found.forward["forward"][0, FIRST:, 0].any()


def test_look_up_moves_to_the_first_stage() -> None:
    """First: 3*b*S*h*e over the memory bandwidth; last: the measured rest."""
    found = rows(VocabStrategy(), stages=2)
    look_up = 3 * 4 * TOKENS / 1e12

    assert found.forward["forward"][0, FIRST, 0] == pytest.approx(look_up)
    assert found.forward["forward"][0, LAST, 0] == pytest.approx(4.5e-3 - look_up)
    assert found.forward["forward"][0, ONLY, 0] == 0.0
    unknown = rows(
        VocabStrategy(), stages=2, hardware=replace(toy_hardware(), memory_bytes_per_s=None)
    )
    np.testing.assert_allclose(unknown.forward["forward"][0, :, 0], [0.0, 0.0, 4.5e-3])


def test_vocabulary_parallel_messages_with_sequence_parallelism() -> None:
    """vtp = 4, b_v = 8: embedding RS / AG, head AG / RS + AG, 3 AR of 4*b*S bytes."""
    found = rows(VocabStrategy(tp=4))
    one, loss = gather(8 * TOKENS, 4), 3 * 2 * gather(4 * 8 * 1024, 4)

    assert found.forward["forward"][0, ONLY, 0] == pytest.approx((5e-4 + 8e-3) / 4)
    assert found.forward["tp"][0, ONLY, 0] == pytest.approx(2 * one + loss)
    assert found.backward["tp"][0, ONLY, 0] == pytest.approx(3 * one)
    pipeline = rows(VocabStrategy(tp=4), stages=2, samples=8)
    np.testing.assert_allclose(pipeline.forward["tp"][0, FIRST:, 0], [one, one + loss], rtol=1e-12)
    np.testing.assert_allclose(pipeline.backward["tp"][0, FIRST:, 0], [one, 2 * one], rtol=1e-12)


def test_vocabulary_parallel_messages_without_sequence_parallelism() -> None:
    """Embedding AR forward, head AR backward, and the loss."""
    found = rows(VocabStrategy(tp=4), sequence_parallel=False)
    one, loss = 2 * gather(8 * TOKENS, 4), 3 * 2 * gather(4 * 8 * 1024, 4)

    assert found.forward["tp"][0, ONLY, 0] == pytest.approx(one + loss)
    assert found.backward["tp"][0, ONLY, 0] == pytest.approx(one)


def test_vocabulary_ulysses_replicates_weights() -> None:
    """No messages, weights as with vtp = 1 reduced over the whole stage, activations over t."""
    found = rows(VocabStrategy(tp=4, ulysses=True), default="zero2")

    assert found.forward["tp"][0, ONLY, 0] == found.backward["tp"][0, ONLY, 0] == 0.0
    m = 10**6
    # and the buffer in which the head is reduced, of whole sums the share that comes out of it
    states = [2 * m + 14 * m // 8 + 2 * m, 4 * m + 12 * m // 8 + 2 * m // 8]
    assert found.states[:, 0, ONLY, 0].tolist() == states
    assert found.activations[0, ONLY, 0] == 8 * 1_000_000
    assert found.shared[0, ONLY, 0] == 0
    assert found.step["optimizer"][0, ONLY, 0] == pytest.approx(26e6 / 8 / 1e12)


def test_context_ranks_have_tokens_of_their_own() -> None:
    """vtp = vcp = 2, b_v = 8: a quarter of the work, half of the tokens in every message."""
    found = rows(VocabStrategy(tp=2, cp=2), default="zero2")
    one, loss = gather(8 * TOKENS / 2, 2), 3 * 2 * gather(4 * 8 * 1024 / 2, 2)

    assert found.forward["forward"][0, ONLY, 0] == pytest.approx((5e-4 + 8e-3) / 4)
    assert found.forward["tp"][0, ONLY, 0] == pytest.approx(2 * one + loss)
    assert found.backward["tp"][0, ONLY, 0] == pytest.approx(3 * one)
    # the head's half of the weights is reduced over two context ranks of two data ranks
    assert found.step["optimizer"][0, ONLY, 0] == pytest.approx(26e6 / 2 / 4 / 1e12)
    whole = rows(VocabStrategy(tp=2), default="zero2", samples=32)
    assert found.activations[0, ONLY, 0] * 2 == whole.activations[0, ONLY, 0]
    assert found.rows.batch.tolist() == whole.rows.batch.tolist() == [8.0]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("default", ["ddp", "zero1", "zero2"])
def test_a_context_group_is_one_of_ulysses(stages: int, default: str) -> None:
    """Both divide tokens alone, and sum gradients over all ranks: the same time and memory."""
    context = rows(VocabStrategy(cp=4), default=default, stages=stages)
    ulysses = rows(VocabStrategy(tp=4, ulysses=True), default=default, stages=stages)

    np.testing.assert_array_equal(context.sums_s, ulysses.sums_s)
    for name in ("states", "activations", "transient", "loss", "logits", "shared"):
        np.testing.assert_array_equal(getattr(context, name), getattr(ulysses, name))


def test_zero1_keeps_gradients_whole() -> None:
    """Of one micro-batch, too; the reduction and the gather are those of ZeRO-2."""
    found = rows(VocabStrategy(), default="zero1")
    zero2 = rows(VocabStrategy(), default="zero2")

    m = 10**6
    # weights and gradients, an eighth of the optimizer, and what comes out of the head's reduction
    states = 4 * m + 12 * m // 8 + 2 * m // 8
    assert found.states[:, 0, ONLY, 0].tolist() == [states, states]
    np.testing.assert_array_equal(found.sums_s, zero2.sums_s)


def test_zero3() -> None:
    """Gathers in forward and backward, shards, and the transients of a layer."""
    found = rows(VocabStrategy(tp=2, zero3=True))
    message = gather(2 * 0.5e6, 4)
    compute = (5e-4 + 4e-3) / 2

    assert found.forward["zero3"][0, ONLY, 0] == pytest.approx(overlap(compute, message) - compute)
    assert found.backward["zero3"][0, ONLY, 0] == pytest.approx(
        overlap(2 * compute, message) - 2 * compute
    )
    buffer, share = 2 * 500_000, 2 * 500_000 // 4
    states = [2_000_000 + buffer, 1_000_000 + 14 * 500_000 // 4 + share]
    assert found.states[:, 0, ONLY, 0].tolist() == states
    # gradients and buffer, or gradients and gathered weights: above what stays beside layers
    transient = found.memory("1f1b")[1][:, 0, ONLY, 0]
    assert transient.tolist() == [4 * 500_000 - buffer, 4 * 500_000 - share]
    assert found.shared[0, ONLY, 0] == 4 * TOKENS + 2 * 500_000


def test_the_larger_table_is_gathered_on_the_only_stage() -> None:
    """Embedding and head are at work one after the other; one shared table is there as a whole."""
    model = toy_model()
    memory = dict(model.other_memory)
    for position, share in (("first", 0.25), ("last", 0.75)):
        memory[position] = {
            lengths: replace(
                entry,
                model_state_bytes={t: share * b for t, b in entry.model_state_bytes.items()},
            )
            for lengths, entry in memory["only"].items()
        }
    model = replace(model, other_memory=memory)
    strategy = VocabStrategy(tp=2, zero3=True)
    tied = replace(toy_spec(), tied_embeddings=True)

    def transient(spec: ModelSpec) -> list[int]:
        found: list[int] = (
            rows(strategy, model=model, spec=spec).memory("1f1b")[1][:, 0, ONLY, 0].tolist()
        )
        return found

    buffer, share = 2 * 375_000, 2 * 375_000 // 4
    assert transient(toy_spec()) == [4 * 375_000 - buffer, 4 * 375_000 - share]
    # its weights and the head's gradient are there all the time: the other gradient adds to them
    assert transient(tied) == [2 * 500_000, 2 * 500_000]


def test_logits_peak() -> None:
    """The loss's peak counts where the head is, over the vocabulary degree."""
    model = toy_model(logits_peak_bytes_per_sample=1000.0)
    found = rows(VocabStrategy(tp=4), stages=2, samples=8, model=model)

    # the gradient of the embedding, 2 bytes of a quarter; 8 samples of 1 MB that the loss has
    transient = found.memory("1f1b")[1][:, 0, :, 0]
    assert transient.tolist() == [[0, 2 * 250_000, 8_000_000 + 2000]] * 2


def test_tied_weights() -> None:
    """One AR of padded_vocab*h/vtp*e_g, in the tail of first and last stage."""
    spec = replace(toy_spec(), tied_embeddings=True)
    found = rows(VocabStrategy(tp=2), stages=2, spec=spec)
    padded = 1024  # 1000 tokens, multiple of 128*2

    assert found.step["tied"][0, :, 0] == pytest.approx(
        [0.0, *[2 * gather(padded * 512 / 2 * 2, 2)] * 2]
    )
    unknown = rows(VocabStrategy(tp=2), stages=2, spec=replace(spec, vocab_size=None))
    assert unknown.step["tied"][0, LAST, 0] == pytest.approx(2 * gather(8e6 / 16 * 2, 2))
    assert not rows(VocabStrategy(tp=2), spec=spec).step["tied"].any()


@pytest.mark.parametrize(
    ("strategy", "table", "spec"),
    [
        (VocabStrategy(tp=1), (1, 12, "ddp"), {}),  # 12 samples over 8 data ranks
        (VocabStrategy(tp=3), (1, 24, "ddp"), {}),  # 3 does not divide 8 ranks
        (VocabStrategy(tp=8), (2, 24, "ddp"), {}),  # 8 does not divide the stage's 4 ranks
        (VocabStrategy(tp=8, zero3=True), (1, 24, "ddp"), {}),  # nobody to shard over
        (VocabStrategy(tp=1), (3, 24, "ddp"), {}),  # 3 stages of 8 ranks
        (VocabStrategy(tp=8), (1, 24, "ddp"), {"seq_length": 1020}),  # sequence shards
    ],
)
def test_illegal(strategy: VocabStrategy, table: Any, spec: dict[str, Any]) -> None:
    """Broken divisibility rules make a strategy invalid, never rounded."""
    model = toy_model()
    if spec:
        times = model.layers[0].times
        model = replace(
            model,
            layers=(
                replace(
                    model.layers[0],
                    times=tuple(replace(t, seq_length=1020) for t in times),
                    memory={1020: model.layers[0].memory[1024]},
                ),
            ),
            other_times=tuple(replace(t, seq_lengths=(1020,)) for t in model.other_times),
            other_memory={
                name: {(1020,): entry[(1024,)]} for name, entry in model.other_memory.items()
            },
        )
    cost = CostModel(toy_spec(**spec), model, toy_hardware(), SearchOptions())

    assert not cost.vocab_rows([strategy], [table]).valid[0, 0]


def test_a_degree_that_was_not_measured_is_not_valid() -> None:
    """Without the memory of vtp = 16 nothing is guessed."""
    cost = CostModel(toy_spec(), toy_model(), toy_hardware(2), SearchOptions())
    found = cost.vocab_rows([VocabStrategy(tp=16), VocabStrategy(tp=8)], [(1, 16, "ddp")])

    assert found.valid.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("seq_length", "mode"), [(512, "sequence"), (1024, "static"), (2048, "static")]
)
def test_the_logits_peak_follows_the_sequence_length(seq_length: int, mode: Any) -> None:
    """It was estimated at the longest length of the profile, 2048, and grows with the tokens."""
    base = toy_model()
    memory = base.other_memory["only"][(1024,)]
    layer = base.layers[0].memory[1024]
    other = {name: {(1024,): memory, (2048,): memory} for name in ("only", "first", "last")}
    lengths = (512, 1024, 2048)
    times = tuple(replace(x, seq_length=n) for x in base.layers[0].times for n in lengths)
    layers = (LayerProfile(times=times, memory={1024: layer, 2048: layer}),)
    others = tuple(replace(x, seq_lengths=(n,)) for x in base.other_times for n in lengths)

    def transient(peak_bytes: float) -> int:
        found = rows(
            VocabStrategy(tp=2),
            spec=toy_spec(seq_length=seq_length),
            model=replace(
                base,
                layers=layers,
                other_memory=other,
                other_times=others,
                logits_peak_bytes_per_sample=peak_bytes,
            ),
            memory_profile_mode=mode,
        )
        return int(found.memory("1f1b")[1][0, 0, ONLY, 0])

    # b_v = 4 samples over two vocabulary ranks; without it the gradient of a table is the peak
    assert transient(8e6) == 4 * 8e6 / 2 * seq_length / 2048
    assert transient(0.0) == 2 * 500_000


@pytest.mark.parametrize("stages", [1, 2])
def test_without_the_shared_buffer_what_is_gathered_is_transient(stages: int) -> None:
    """b_v*S*h*e moves from the shared buffer to the transient of each position."""
    on = rows(VocabStrategy(tp=2), stages=stages)
    off = rows(VocabStrategy(tp=2), stages=stages, global_memory_buffer=False)

    assert on.shared.any()
    assert not off.shared.any()
    np.testing.assert_array_equal(off.beside_loss - on.beside_loss, [on.shared, on.shared])


@pytest.mark.parametrize("pipeline_type", ["1f1b", "gpipe"])
def test_the_loss_is_over_when_a_layer_runs_backward(pipeline_type: PipelineType) -> None:
    """It is transient; what the first stage keeps stays, and all that GPipe's last stage keeps."""
    lengths = (1024,)
    small = OtherMemory(model_state_bytes={2: 8e6}, activation_bytes_per_sample={2: 3e5})
    model = toy_model()
    model = replace(model, other_memory={**model.other_memory, "first": {lengths: small}})
    cost = CostModel(toy_spec(), model, toy_hardware(), SearchOptions(time_profile_mode="batch"))
    tables = cost.tables(
        [], [VocabStrategy(tp=2)], [(1, 8, "ddp"), (2, 8, "ddp")], [], pipeline_type
    )
    kept, passing = tables.vocab_activation_bytes[..., 0], tables.vocab_transient_bytes[1, ..., 0]
    # GPipe keeps all but the logits of 2 bytes beside a softmax of 4
    logits = 2_666_667
    last = [4 * 2e6 - logits, logits] if pipeline_type == "gpipe" else [0, 4 * 2e6]

    assert kept[0, ONLY] == 2 * 3e5
    assert passing[0, ONLY] == 2 * (2e6 - 3e5)
    # the gradient of the embedding
    assert (kept[1, FIRST], passing[1, FIRST]) == (4 * 3e5, 2 * 500_000)
    assert [kept[1, LAST], passing[1, LAST]] == last
