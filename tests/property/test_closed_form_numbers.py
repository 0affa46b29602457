"""Machines and models with any numbers: every figure of the closed forms is finite, or refused.

No NaN is ever among the best, for any way to ask a question.
"""

from __future__ import annotations

import copy
import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from msgspec import to_builtins

from autopar.errors import DocumentError, InfeasibleExecution, InputError
from search.closed_form import LARGEST_RATE, SMALLEST_RATE, calculon, tensor2d
from search.closed_form.calculon.exploration import Space, explore
from search.closed_form.files import calculon_system, tensor2d_system
from search.closed_form.tensor2d.exploration import survey
from search.commands import estimate as estimate_command, explore as explore_command
from tests.often import often
from tests.parity.test_tensor2d_engine import every_candidate

LEGAL = [SMALLEST_RATE, SMALLEST_RATE, 1e-9, 1e-3, 1, 1.0, 7.5, LARGEST_RATE, LARGEST_RATE]
HOSTILE = [
    *(0, -1, -0.0, 5e-324, 1e-308, 1e-300, 1e300, 1.7e308, math.inf, math.nan),
    *(10**400, 2**63, True, None, "fast", []),
]
SIZES = [1, 2, 3, 7, 8, 16, 96, 128, 1000, 1024, 4099, 2**20, 735_134_400, 999_999_937, 10**9]
BAD_SIZES = [0, -1, 2**31, 2**63, 10**400, 1.5, math.nan, "many", None, True]


def numbers(document: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all numbers of a document."""
    if isinstance(document, dict):
        return [at for key, item in document.items() for at in numbers(item, (*place, key))]
    if isinstance(document, list):
        return [at for key, item in enumerate(document) for at in numbers(item, (*place, key))]
    return [place] if isinstance(document, int | float) and not isinstance(document, bool) else []


def with_numbers(document: Any, changes: list[tuple[int, object]]) -> Any:
    """Return a copy with some numbers replaced: (index, new value)."""
    changed, places = copy.deepcopy(document), numbers(document)
    for which, value in changes:
        *folders, last = places[which % len(places)]
        inner = changed
        for key in folders:
            inner = inner[key]
        inner[last] = value
    return changed


def changes_of(legal: list[Any], hostile: list[Any]) -> st.SearchStrategy[list[tuple[int, object]]]:
    """Return a strategy of (index, new value); three in four examples have only legal values."""
    several = [
        st.lists(st.tuples(st.integers(0, 63), st.sampled_from(values)), max_size=6)
        for values in (legal, legal, legal, legal + hostile)
    ]
    return st.one_of(several)


MACHINES, MODELS = changes_of(LEGAL, HOSTILE), changes_of(SIZES, BAD_SIZES)


TENSOR2D = to_builtins(tensor2d_system("a100"))
MODEL = {"l": 2048, "e": 1024, "h": 16, "depth": 24, "f": 4096, "vocab": 1000, "kv_heads": 8}
CALCULON = to_builtins(calculon_system("a100"))
APPLICATION = {
    "hidden": 1024,
    "feedforward": 4096,
    "seq_size": 2048,
    "attn_heads": 16,
    "attn_size": 64,
    "num_blocks": 24,
    "vocab_size": 1000,
}
EXECUTION: dict[str, Any] = {
    "tensor_par": 2,
    "pipeline_par": 2,
    "data_par": 2,
    "tensor_par_net": 0,
    "pipeline_par_net": 1,
    "data_par_net": 1,
    "batch_size": 8,
    "microbatch_size": 1,
    "datatype": "float16",
    "fused_activation": True,
    "attention_type": "flash",
    "activation_recompute": "attn_only",
    "pipeline_interleaving": 2,
    "optimizer_sharding": True,
    "tensor_par_comm_type": "rs_ag",
    "tensor_par_overlap": "ring",
    "seq_par_ag_redo": True,
    "data_par_overlap": True,
    "weight_offload": True,
    "activations_offload": True,
    "optimizer_offload": True,
}


def finite(figures: dict[str, Any]) -> bool:
    """Return True if all figures are finite; an impossible bandwidth may be infinite."""
    return not any(
        math.isnan(value) or (math.isinf(value) and not name.endswith("_bw_req"))
        for name, value in figures.items()
        if isinstance(value, float)
    )


@often(60, 1500, MACHINES, MODELS, st.sampled_from(["1d", "2d"]))
def test_tensor2d(machine: Any, sizes: Any, strategy: Any) -> None:
    """One candidate, many, and a search, in the default and in the published model."""
    system, model = with_numbers(TENSOR2D, machine), with_numbers(MODEL, sizes)
    config = {"dp": 2, "pp": 2, "mbs": 1, **({"tp": 2} if strategy == "1d" else {})}
    config |= {} if strategy == "1d" else {"tp1": 2, "tp2": 1, "nb": 2}
    placement = {f"nv_{name}": 1 for name in config if name not in ("mbs", "nb")}
    for compat in (False, True):
        try:
            one = tensor2d.evaluate(
                strategy, model, config, placement, 8, 16, system, compat=compat
            )
            assert finite(one), one
            assert one["t"] > 0
        except InfeasibleExecution:
            pass
        except DocumentError:  # names the document and its key
            return
        many = tensor2d.evaluate_many(
            strategy, model, [config | placement], 8, 16, system, compat=compat
        )
        assert all(np.isfinite(many[name]).all() for name in many.dtype.names if name != "reason")
        where = strategy, model, 8, 16, system
        found, every = every_candidate(*where, top=3, compat=compat)
        assert all(finite(point.statistics) for point in found.best)
        assert np.isfinite(every["time_s"]).all()
        rates = [point.rate_per_s for point in found.best]
        assert rates == sorted(rates, reverse=True)
        assert all(0 < rate < math.inf for rate in rates)


@often(60, 1500, MACHINES, MODELS)
def test_calculon(machine: Any, sizes: Any) -> None:
    """One execution, many, and a search, in the default and in the published model."""
    system, application = with_numbers(CALCULON, machine), with_numbers(APPLICATION, sizes)
    for compat in (False, True):
        try:
            execution = EXECUTION | ({"attention_type": "multihead"} if compat else {})
            one = calculon.evaluate(application, execution, system, compat=compat, layers=True)
            assert all(finite(layer) for layer in one.pop("layers"))
            assert finite(one), {k: v for k, v in one.items() if not finite({k: v})}
            assert one["total_time"] > 0
        except InfeasibleExecution:
            pass
        except DocumentError:
            return
        many = calculon.evaluate_many(application, [execution], system, compat=compat)
        assert all(np.isfinite(many[name]).all() for name in many.dtype.names if name != "reason")
        space = Space(num_procs=4, max_batch=4, tensor_overlap=False, offload=False)
        found = explore(application, system, space, top=3, compat=compat, frontier=True)
        rates = [row.rate_per_s for row in found.best]
        assert rates == sorted(rates, reverse=True)
        for row in (*found.best, *found.frontier):
            assert 0 < row.time_s < math.inf
            assert 0 < row.rate_per_s < math.inf
            assert 0 <= row.memory_bytes < math.inf


def said(run: Any, words: list[str]) -> tuple[int, str, str]:
    """Return the exit code of a command, and its stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(words)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("value", [0, 5e-324, 1e-300, 1e300, -1])
@pytest.mark.parametrize(
    "key",
    [
        *("matrix_flops_fp16", "vector_flops_fp16", "hbm_bandwidth", "hbm_capacity"),
        *("nvlink_bandwidth", "nvlink_eff", "ib_bandwidth", "ib_eff", "flops_units"),
        *("element_size", "mask_element_size", "nic_factor"),
    ],
)
def test_commands_name_file_and_key_of_a_rate_that_no_machine_has(
    key: str, value: float, tmp_path: Path
) -> None:
    """Neither `inf s` nor a rank is printed for NaN."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(TENSOR2D | {key: value}), encoding="utf-8")
    one = ["--strategy", "1d", "--config", "dp=2,tp=2,pp=2,mbs=1", "--batch", "16"]
    whole = ["--num-gpus", "8", "--batch", "16"]
    for run, words in ((estimate_command.run, one), (explore_command.run, whole)):
        code, out, err = said(
            run, ["tensor2d", "--model", "gpt2-xl", "--system", str(path), *words]
        )
        assert (code, out) == (2, "")
        assert f"{path}: key '{key}'" in err


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("matrix", "float16", "gflops_efficiency"), [[0.0, 5e-324]]),
        (("mem1", "MB_efficiency"), [[0.0, 1e-300]]),
        (("networks", 0, "efficiency"), 5e-324),
        (("networks", 0, "bandwidth"), 0),
        (("networks", 1, "ops", "all_reduce"), [1e300, -1.0]),
        (("networks", 1, "ops", "all_gather"), [1.0, 1e300]),
        (("matrix", "float16", "tflops"), 0),
    ],
)
def test_commands_name_file_and_key_of_a_calculon_machine(
    place: tuple[Any, ...], value: object, tmp_path: Path
) -> None:
    """Also with changed curves and collectives."""
    system = copy.deepcopy(CALCULON)
    inner = system
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(system), encoding="utf-8")
    words = ["calculon", "--application", "gpt2-xl", "--system", str(path)]
    one = [*words, "--execution", "1x8-tp8"]
    whole = [*words, "--num-procs", "8", "--max-batch", "8"]
    for run, given in ((estimate_command.run, one), (explore_command.run, whole)):
        code, out, err = said(run, given)
        assert (code, out) == (2, "")
        key = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place)
        assert f"{path}: key '{key.removeprefix('.')}" in err


def test_heads_without_a_width_are_refused() -> None:
    """Their GEMMs would have negative FLOP."""
    with pytest.raises(InputError, match=r"key 'e': the value is 8, expected at least h = 16"):
        survey("1d", MODEL | {"e": 8}, 8, 16, TENSOR2D)
