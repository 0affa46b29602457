"""Every rank holds its part of one global batch, in the order of the micro-batches."""

from __future__ import annotations

import pytest

from autopar.records import replace

torch = pytest.importorskip("torch", reason="the profilers need torch")

from autopar.errors import InputError  # noqa: E402
from autopar.run.plan import LayerStrategy, VocabStrategy  # noqa: E402
from profiler.plan.arithmetic import check_job, vocab_layout  # noqa: E402
from profiler.plan.exchange import Batch, global_tokens, local_batch  # noqa: E402
from profiler.plan.job import PlanJob  # noqa: E402
from tests.plan_cases import LLAMA, make_job  # noqa: E402


def _job(vocab: VocabStrategy, world: int = 4, m: int = 2) -> PlanJob:
    return make_job(world, LayerStrategy(), vocab=vocab, m=m, batch=16)


def _held(job: PlanJob, step: int = 0) -> list[Batch]:
    cube = check_job(job)
    layout = vocab_layout(job, cube)
    return [
        local_batch(job, layout, place, step=step, device="cpu") for place in range(cube.num_ranks)
    ]


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("ulysses", [False, True])
def test_ranks_together_hold_every_sample_once(m: int, degree: int, ulysses: bool) -> None:
    job = _job(VocabStrategy(tp=degree, ulysses=ulysses), m=m)
    tokens, labels = global_tokens(job, 0)
    assert tokens.shape == labels.shape == (16, 16)
    found = torch.full((2, 16, 16), -1)
    data = 4 // degree
    samples = 16 // m // data
    for place, batch in enumerate(_held(job)):
        at, piece = divmod(place, degree)
        assert len(batch.labels) == m
        length = 16 // degree if ulysses else 16
        columns = slice(piece * length, (piece + 1) * length) if ulysses else slice(None)
        for k in range(m):
            first = k * (16 // m) + at * samples  # micro-batch by micro-batch, then rank by rank
            rows = slice(first, first + samples)
            own = batch.tokens[k * samples : (k + 1) * samples]
            assert torch.equal(own, tokens[rows, columns])
            assert torch.equal(batch.labels[k], labels[rows, columns].t())
            found[0, rows, columns], found[1, rows, columns] = own, batch.labels[k].t()
    assert torch.equal(found, torch.stack([tokens, labels]))


def test_tokens_depend_on_seed_and_step_alone() -> None:
    one, other = _job(VocabStrategy()), _job(VocabStrategy(tp=4), m=4)
    assert torch.equal(global_tokens(one, 3)[0], global_tokens(other, 3)[0])
    assert not torch.equal(global_tokens(one, 0)[0], global_tokens(one, 1)[0])
    assert not torch.equal(global_tokens(one, 0)[0], global_tokens(replace(one, seed=1), 0)[0])
    tokens, labels = global_tokens(one, 0)
    assert not torch.equal(tokens, labels)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 250


def test_tensors_are_laid_out_for_the_embedding_and_the_loss() -> None:
    (batch, *_) = _held(_job(VocabStrategy(tp=2, ulysses=True)))
    assert batch.tokens.shape == (8, 8)
    assert batch.tokens.is_contiguous()
    assert [labels.shape for labels in batch.labels] == [(8, 4), (8, 4)]
    assert all(labels.is_contiguous() for labels in batch.labels)


def test_a_model_without_vocabulary_is_refused() -> None:
    job = _job(VocabStrategy())
    job = replace(job, spec=replace(LLAMA, vocab_size=None))
    with pytest.raises(InputError, match=r"^model 'llama-like': the vocabulary size is unknown"):
        global_tokens(job, 0)


def test_the_largest_seed_has_tokens() -> None:
    """Seeds are taken as they are, also where a step beyond them has more than 63 bits."""
    job = replace(_job(VocabStrategy()), seed=(1 << 63) - 1)
    assert not torch.equal(global_tokens(job, 0)[0], global_tokens(job, 1)[0])
