"""msgspec reads valid documents like the walk over types; damage is reported with its key."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

import autopar.documents.strategy as strategies
from autopar.documents import sidecar
from autopar.documents.checks import DOCUMENTS, PatternDocument
from autopar.documents.json import MOST_ERRORS, Fault, converted, faults, read_record
from autopar.documents.plan import PlanDocument, ResultDocument, RunDocument
from autopar.documents.schemas import json_schemas
from autopar.errors import DocumentError
from autopar.families import decoders, others
from autopar.rates.card import CardDocument
from autopar.rates.stack import StackDocument
from autopar.records import Record
from search.closed_form.calculon.documents import Application, Execution, System
from search.closed_form.files import calculon_system, tensor2d_system
from search.closed_form.tensor2d.documents import CandidateFile, Model, System as Machine
from search.engines.galvatron.plan import _GlobalMode
from tests.unit.documents_support import DOCUMENTS as VALID

ROOT = Path(__file__).resolve().parent.parent.parent
json_schemas()  # imports the modules of all documents
STRATEGY = {
    "pp_deg": 2,
    "tp_sizes_enc": "1,2,2,1",
    "tp_consecutive_flags": "1,1,1,1",
    "dp_types_enc": "0,1,1,0",
    "world_size": 8,
    "global_bsz": 16,
    "chunks": 4,
    "pp_division": "2,2",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "ddp",
    "vtp": 1,
    "embed_sdp": 0,
}
_FREE = ("config.json", "run")
"""Documents with objects defined by others or by `autopar check`, whose keys are not checked."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 7, 10**9, 10**400, 2**53 + 1),
    *(0.0, 1.0, 0.5, -0.5, 1e-9, 1e300, math.nan, math.inf, -math.inf),
    *("", "1", "x", "2048", "true", "bf16", "allreduce", "ok", "1,2"),
    *([], [1], [1, 2], [1.0, 2.0], [None, 1.0], ["a"], [[1.0, 0.5], [0.0, 0.9]], (), (1, 2)),
    *({}, {"1": 1.0}, {"a": None}, {"time": [1.0]}, {"value": 1.0}, {1: 2}),
)
KEYS = ("_comment", "unknown", "root", "1", "8192", "layertype_0", "version", "name", "checkpoint")


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _documents() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, model and content of valid documents of every kind."""
    for role, content in VALID.items():
        if role in DOCUMENTS:
            yield role, DOCUMENTS[role], content
    configs = sorted((ROOT / "models" / "llama2-7b" / "configs").glob("*.meta.json"))
    for path in (*configs, *sorted((ROOT / "hardware_configs").glob("*_1x8/*.meta.json"))):
        yield path.name, sidecar.Sidecar, _shortened(json.loads(path.read_text("utf-8")))
    for path in sorted((ROOT / "hardware_configs" / "cards").glob("*.json")):
        yield path.name, CardDocument, json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "hardware_configs" / "stacks").glob("*.json")):
        yield path.name, StackDocument, json.loads(path.read_text(encoding="utf-8"))
    llama = {
        "vocab_size": 32000,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "intermediate_size": 512,
        "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }
    yield "config.json", decoders.Decoder, llama
    gpt2 = {"vocab_size": 9, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_ctx": 128}
    yield "gpt2", others._Gpt2, gpt2
    yield "strategy", strategies._GalvatronFile, STRATEGY
    paddle = {
        "tp_size_list": "1,2",
        "pp_size": 1,
        "dp_size_list": "2,1",
        "chunks": 1,
        "pp_stage_idx_list": "0,0",
        "global_batch_size": 8,
        "gradient_accumulation_steps": 1,
    }
    yield "paddle", strategies._PaddleFile, {k: v for k, v in paddle.items() if k != "chunks"}
    yield "galvatron", _GlobalMode, {"pp_deg": "2", "global_tp_deg": -1, "sdp": 1}
    entry = {"name": "tp", "bytes": 1}
    plan = {
        "format": "autopar-plan",
        "version": 1,
        "plan": STRATEGY,
        "status": "optimal",
        "prediction": {"stages": [{"stage": 0, "memory_bytes": entry | {"name": 2}}]},
        "options": {"sequence_parallel": True, "zebra": 1},
        "request": {"model": "x"},
    }
    yield "plan", PlanDocument, plan
    yield "run", RunDocument, _read("tests/data/run_v2.json")
    yield (
        "result",
        ResultDocument,
        {k: v for k, v in plan.items() if k not in ("format", "version")},
    )
    sizes = {"hidden": 64, "feedforward": 256, "seq_size": 128, "attn_heads": 4}
    yield "application", Application, sizes | {"attn_size": 16, "num_blocks": 2, "causal": 1}
    yield "execution", Execution, _read("hardware_configs/executions/1x8-tp8.json")
    yield "system", System, to_builtins(calculon_system("a100-80gb"))
    yield "machine", Machine, to_builtins(tensor2d_system("a100-80gb"))
    yield "model", Model, {"l": 128, "e": 64, "h": 4, "depth": 2}
    yield "candidate", CandidateFile, {"strategy": "1d", "config": {"dp": 1}, "n_gpus": 8}


def _shortened(value: Any) -> Any:
    """Return a document with only the first items of its lists and tables."""
    if isinstance(value, list):
        return [_shortened(item) for item in value[:3]]
    if isinstance(value, dict):
        most = 40 if "version" in value else 12
        return {key: _shortened(item) for key, item in list(value.items())[:most]}
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every pair of a container of a document and one of its keys."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    found: list[tuple[Any, Any]] = [(value, key) for key, _ in items]
    return found + [place for _, item in items for place in _places(item)]


def _damaged(content: Any, draw: random.Random) -> Any:
    """Return a document with one to three changes."""
    document = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = _places(document)
        if not places:
            return draw.choice(ODD)
        container, key = draw.choice(places)
        change = draw.randrange(5)
        if change == 0 and isinstance(container, dict):
            del container[key]
        elif change == 1 and isinstance(container, dict):
            container[draw.choice((*KEYS, str(key)[:-1], f"{key}0"))] = copy.deepcopy(
                draw.choice((*ODD, container[key]))
            )
        elif change == 2 and isinstance(container[key], int | float | list):
            container[key] = container[key] * draw.choice((2, -1, 0))
        else:
            container[key] = copy.deepcopy(draw.choice(ODD))
    return document


def _shown(value: Any) -> Any:
    """Return a value with its types, so that 1, 1.0 and true differ and NaN is itself."""
    if isinstance(value, Record):
        named = {name: _shown(getattr(value, name)) for name in value.__struct_fields__}
        return type(value).__name__, named
    if isinstance(value, PatternDocument):
        return type(value).__name__, _shown(value.root)
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [_shown(item) for item in value]
    # the sign of a zero, which the two keep or drop, has no effect
    return type(value).__name__, repr(value + 0.0 if isinstance(value, float) else value)


ALL = list(_documents())


@pytest.mark.whole
@pytest.mark.parametrize("damaged", [60, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "kind", "content"), ALL, ids=[name for name, _, _ in ALL])
def test_what_is_read_at_once_is_what_the_walk_reads(
    name: str, kind: Any, content: Any, damaged: int
) -> None:
    draw = random.Random(name)
    accepted = 0
    for document in (content, *(_damaged(content, draw) for _ in range(damaged))):
        if not isinstance(document, dict):
            continue
        found: list[Fault] = []
        walked = converted(kind, copy.deepcopy(document), "", found)
        if found:
            with pytest.raises(DocumentError) as caught:
                read_record(kind, "f.json", copy.deepcopy(document))
            assert caught.value.problem in [problem for _, problem in found]
            continue
        accepted += 1
        read = read_record(kind, "f.json", copy.deepcopy(document))
        assert _shown(read) == _shown(walked)
    assert accepted


@pytest.mark.parametrize(("name", "kind", "content"), ALL, ids=[name for name, _, _ in ALL])
def test_every_number_that_is_none_is_refused(name: str, kind: Any, content: Any) -> None:
    """Numbers that are not finite are refused at once, each with its key, up to the limit."""
    document = copy.deepcopy(content)
    numbers = [(at, key) for at, key in _places(document) if type(at[key]) is float]
    before = {key for key, _ in faults(kind, document)}
    for at, key in numbers:
        at[key] = math.nan
    found = {key for key, _ in faults(kind, document)} - before
    # unread content, such as options and predictions, may be anything
    assert len(found) >= min(len(numbers), MOST_ERRORS) or name in _FREE
