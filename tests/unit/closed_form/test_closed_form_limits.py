"""Questions that are too large: refused before they begin, in little memory; ended by Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import math
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins

from autopar.documents.checks import load_document
from autopar.errors import InputError
from autopar.records import replace
from search.closed_form import MOST_KEPT, MOST_PROCESSORS, MOST_SEARCHES, calculon, tensor2d
from search.closed_form.calculon.exploration import Space, explore, peers
from search.closed_form.files import calculon_system, load_execution, tensor2d_system
from search.closed_form.questions import CalculonSearch, SearchSettings
from search.closed_form.session import Session
from search.closed_form.tensor2d.exploration import fastest_placement, survey
from search.closed_form.tuners import tune
from search.commands import estimate as estimate_command, explore as explore_command
from tests.command_lines import last_said
from tests.interrupts import interrupted
from tests.unit.explore_documents import (
    MODEL,
    calculon as calculon_words,
    tensor2d as tensor2d_words,
)

MANY = 735_134_400
"""Has 1,344 divisors, more than any other number up to a billion."""
APPLICATION = {
    **dict.fromkeys(("hidden", "feedforward", "seq_size", "attn_heads", "num_blocks"), MANY),
    "attn_size": 1,
}
WIDE = dict.fromkeys(("l", "e", "h", "depth", "f"), MANY)
SYSTEM = to_builtins(calculon_system("a100"))
MACHINE = to_builtins(tensor2d_system("a100")) | {"hbm_capacity": 1e15}


@contextlib.contextmanager
def bounded(seconds: float = 5.0, grown_mib: float = 800.0) -> Iterator[None]:
    """Say how many CPU seconds and how much memory what is inside may take."""
    begin_s, begin_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - begin_s < seconds
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin_kib) / 1024
    assert grown < grown_mib


@pytest.mark.whole
@pytest.mark.parametrize(
    ("domain", "keep_all"),
    [
        *((8, False), (8, True), (10**9, False), (10**9, True)),
        pytest.param(55440, False, marks=pytest.mark.slow),  # of the most candidates
    ],
)
def test_sizes_of_many_divisors_in_two_dimensions(domain: int, keep_all: bool) -> None:
    """Counted before they are searched."""
    with bounded(20.0), contextlib.suppress(InputError):
        survey(
            *("2d", WIDE, 720_720, 14_414_400, MACHINE | {"nvlink_size": domain}),
            top=1,
            each=(lambda *_: None) if keep_all else None,
        )


@pytest.mark.whole
def test_candidates_that_no_list_holds() -> None:
    """Counted, and refused before the first is priced."""
    with (
        bounded(20.0),
        pytest.raises(
            InputError, match=r"more than 10,000,000 candidates, and all are kept \(as --all"
        ),
    ):
        survey(
            *("2d", WIDE, 720_720, 14_414_400, MACHINE | {"nvlink_size": 55440}),
            each=lambda *_: None,
        )


def test_sizes_of_many_divisors_after_calculon() -> None:
    """The same, and where all points of a pair of degrees are asked for."""
    space = Space(num_procs=720_720, max_batch=14_414_400)
    with bounded(), pytest.raises(InputError, match="more than 10,000,000,000 executions"):
        explore(APPLICATION, SYSTEM, space)
    less = Space(num_procs=8, max_batch=720_720)
    with bounded(), pytest.raises(InputError, match="10,000,000"):
        explore(APPLICATION, SYSTEM, less, each=lambda *_: None)


@pytest.mark.parametrize(
    "value", [0, -1, MOST_PROCESSORS + 1, 10**9, 2**31, 10**400, 1.5, "8", None]
)
def test_processors_that_no_search_has(value: Any) -> None:
    """From Python and by command alike."""
    with pytest.raises(InputError, match=r"num_procs: .* expected an integer from 1 to 1048576"):
        Space(num_procs=value, max_batch=8)
    with pytest.raises(InputError, match=r"n_gpus: .* expected an integer from 1 to 1048576"):
        tensor2d.explore("1d", MODEL, value, 8, MACHINE)
    with pytest.raises(InputError, match=r"max_batch: .* expected an integer from 1 to 16777216"):
        Space(num_procs=8, max_batch=value if value != MOST_PROCESSORS + 1 else 10**8)


def said(run: Callable[[list[str]], int], words: list[str]) -> tuple[int, str]:
    """Return the exit code of a command, and what it says on stderr."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = run(words)
    return code, err.getvalue()


LONG = ",".join(map(str, range(1, 1_500_000)))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--num-procs", "1000000000"], "--num-procs"),
        (["--num-procs", LONG], "--num-procs"),
        (["--max-batch", "1000000000"], "--max-batch"),
        (["--max-batch", "9" * 10_000_000], "--max-batch"),
        (["--top", "1000000000"], "--top"),
        (["--sweep", "system.mem1.GiB=1:1e9:1"], "has too many values, expected 10000 at most"),
        (["--sweep", "system.mem1.GiB=1:1e308:1e-308"], "has too many values"),
        (["--sweep", "system.mem1.GiB=5e-324:1e308:x1.0000000000000002"], "has too many values"),
        (["--sweep", "system.mem1.GiB=-1e308:1e308:1"], "has too many values"),
        (["--sweep", f"system.mem1.GiB={LONG}"], "has too many values"),
        (["--sweep", "x" * 10_000_000], "--sweep"),
        (
            ["--sweep", "system.mem1.GiB=1:5000:1", "--num-procs", "1,2,4"],
            "15,000 searches are too many, expected 10,000 at most",
        ),
    ],
)
def test_too_much_of_a_command(more: list[str], sentence: str, tmp_path: Path) -> None:
    """One sentence, before the work, whatever the length of a word."""
    words = calculon_words(tmp_path)
    with bounded(10.0, 1500.0):
        code, err = said(explore_command.run, last_said([*words, *more]))
    assert code == 2
    assert sentence in err
    assert len(err) < 2000
    assert err.count("\n") == 1


def test_searches_of_one_command_in_two_dimensions(tmp_path: Path) -> None:
    """Strategies count."""
    words = tensor2d_words(tmp_path)
    code, err = said(explore_command.run, [*words, "--sweep", "system.hbm_capacity=1:4000:1"])
    assert code == 2
    assert f"12,000 searches are too many, expected {MOST_SEARCHES:,} at most" in err


def test_partners_of_many_ranks(tmp_path: Path) -> None:
    """Their number is known before their table."""
    execution, *_ = load_execution("1x8-tp8", _known(), compat=False)
    large = replace(execution, tensor_par=8, data_par=10**8, num_procs=8 * 10**8)
    with bounded(), pytest.raises(InputError, match="800,000,000"):
        peers(large)
    assert len(peers(execution)) == 8


def _known() -> Any:
    from search.closed_form.files import load_application

    return load_application("llama2-7b")


def test_placements_of_many_divisors() -> None:
    """Refused before the first is priced, with what to give; usual ones are tried."""
    config = {"dp": 720_720, "tp": 720_720, "pp": 720_720, "mbs": 1}
    with bounded(), pytest.raises(InputError, match="100,000"):
        fastest_placement("1d", config, 8, lambda _: {"t": 1.0})
    code, err = said(
        estimate_command.run,
        [
            *("tensor2d", "--model", "llama2-7b", "--system", "a100", "--strategy", "1d"),
            *("--config", "dp=720720,tp=720720,pp=720720,mbs=1", "--batch", "720720"),
        ],
    )
    assert code in (2, 3)
    assert err.count("\n") == 1


def test_points_that_a_tuner_draws() -> None:
    """All of them are in memory at once."""
    execution, *_ = load_execution("1x8-tp8", _known(), compat=False)
    space = to_builtins(execution)
    with bounded(), pytest.raises(InputError, match="random draws at most 10,000,000 points"):
        tune(_known().application, SYSTEM, space, tuner="random", evaluations=MOST_KEPT + 1)


# --------------------------------------------------------------------------------------------------
# Arrays that nobody checked.


COLUMNS = {"dp": [2], "tp": [2], "pp": [2], "mbs": [1], "nv_tp": [1], "nv_dp": [1], "nv_pp": [1]}
EXECUTION = {
    **json.loads(json.dumps(to_builtins(load_execution("1x8-tp8", _known(), compat=False)[0]))),
}
DERIVED = {key: value for key, value in EXECUTION.items() if key != "num_procs"}
"""Its degrees say the processors."""
HOSTILE: list[Any] = [
    *([math.nan], [math.inf], [-1], [2**31], [2**63], [2**64], [10**400], [1.5], ["x"], [None]),
    *([[1, 2], [3]], [{}], {}, object(), np.array([1], "datetime64[s]"), np.array([1j])),
    *(np.array([1.0]), np.array(["a"]), np.array([b"a"]), np.array([-(2**63)])),
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value).split(" at 0x")[0][:30])
def test_columns_of_any_kind(value: Any) -> None:
    """One error that names the column."""
    for name in ("dp", "mbs", "nv_tp"):
        with pytest.raises(InputError, match=rf"candidates.{name}: the value is"):
            tensor2d.evaluate_many("1d", MODEL, COLUMNS | {name: value}, 8, 16, MACHINE)
    for name in ("tensor_par", "batch_size", "optimizer_sharding"):
        for columns in (EXECUTION, DERIVED):
            with pytest.raises(InputError, match=rf"executions.{name}: the value is"):
                calculon.evaluate_many(_known().application, columns | {name: value}, SYSTEM)


def test_degrees_whose_product_no_integer_holds() -> None:
    """Nothing wraps: neither in 32 nor in 64 bits."""
    large = np.array([2**16], np.int32)
    with pytest.raises(InputError, match=r"tensor_par \* pipeline_par \* data_par is 4294967296"):
        calculon.evaluate_many(
            *(_known().application, DERIVED | {"tensor_par": large, "data_par": large}, SYSTEM)
        )
    with pytest.raises(InputError, match="columns have lengths"):
        calculon.evaluate_many(
            *(_known().application, DERIVED | {"tensor_par": [1, 2], "data_par": [1] * 3}, SYSTEM)
        )


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros(3),
        np.zeros((2, 2), dtype="f4"),
        np.array(["a"]),
        np.array(5),
        np.zeros(2, dtype=[("dp", "f8")]),
        np.array([object()]),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
def test_rows_of_other_types(rows: Any) -> None:
    """Refused by name, whatever their shape."""
    with pytest.raises(InputError, match="executions: the array has fields"):
        calculon.evaluate_many(_known().application, rows, SYSTEM)
    with pytest.raises(InputError, match="candidates: the array has fields"):
        tensor2d.evaluate_many("1d", MODEL, rows, 8, 16, MACHINE)


def test_rows_of_any_bytes() -> None:
    """What no check of Python saw is refused by the core, with a reason each."""
    rng = np.random.default_rng(0)
    for dtype, price in (
        (
            calculon.EXECUTION,
            lambda rows: calculon.evaluate_many(_known().application, rows, SYSTEM),
        ),
        (
            tensor2d.engine.CANDIDATE,
            lambda rows: tensor2d.evaluate_many("2d", MODEL, rows, 8, 16, MACHINE),
        ),
    ):
        raw = rng.integers(0, 256, size=2000 * dtype.itemsize, dtype=np.uint8)
        for rows in (raw.view(dtype), np.zeros(4, dtype), np.zeros((2, 3), dtype)):
            found = price(rows)
            assert found.size == rows.size
            assert not found["ok"].any()
            assert all(found["reason"].ravel().tolist())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"fused_activation": "maybe"}, "fused_activation: the value is 'maybe', expected one of"),
        ({"fused_activation": True}, "fused_activation: the value is true, expected one of"),
        ({"offload": "no"}, "offload: the value is 'no', expected true or false"),
        ({"fixed_batch": None}, "fixed_batch: the value is null, expected true or false"),
        ({"uneven": 2}, "uneven: the value is 2, expected true or false"),
    ],
)
def test_words_and_switches_of_a_space(fields: dict[str, Any], sentence: str) -> None:
    """None is taken for true, or for a space without executions."""
    with pytest.raises(InputError, match=sentence):
        Space(num_procs=8, max_batch=8, **fields)


@pytest.mark.parametrize("value", ["yes", 1, None, tensor2d.Quirks(), []])
def test_compat_that_is_neither_true_nor_false(value: Any) -> None:
    """Nor the switches of the other model."""
    with pytest.raises(InputError, match=r"compat: the value is .* expected true or false"):
        calculon.evaluate(_known().application, EXECUTION, SYSTEM, compat=value)


# --------------------------------------------------------------------------------------------------
# Ctrl-C.


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_a_search_after_calculon(threads: int) -> None:
    """In the middle of a pair of degrees, whose blocks have more than a thousand divisors."""
    space = Space(num_procs=8, max_batch=5040)
    room = SYSTEM | {"mem1": SYSTEM["mem1"] | {"GiB": 1e15}, "mem2": SYSTEM["mem2"] | {"GiB": 1e15}}
    sizes = APPLICATION | {"hidden": 5040, "feedforward": 5040, "seq_size": 5040, "attn_heads": 16}
    with interrupted(0.4):
        explore(sizes, room, space, frontier=True, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_a_search_in_two_dimensions(threads: int) -> None:
    """While its space is listed, counted or searched."""
    machine = MACHINE | {"nvlink_size": 720}
    with interrupted(0.3):
        for batch in (720_720, 1_441_440, 2_162_160):
            survey("2d", WIDE, 720_720, batch, machine, top=1, threads=threads)


def test_ctrl_c_ends_the_pricing_of_many() -> None:
    """Of rows without end, as far as a test has room for them."""
    row = calculon.engine.pack_executions([EXECUTION])
    rows = np.repeat(row, 2_000_000)
    rows["microbatch_size"] = 1
    rows["tensor_par_comm_type"] = np.arange(len(rows)) % 3
    with interrupted(0.05):
        while True:
            calculon.evaluate_many(_known().application, rows, SYSTEM)


def test_work_in_another_thread_is_not_interrupted() -> None:
    """Ctrl-C is of the main thread; elsewhere answers are as ever."""
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(tensor2d.explore("1d", MODEL, 8, 16, MACHINE, top=1))
    )
    thread.start()
    thread.join(20)
    assert found[0] == tensor2d.explore("1d", MODEL, 8, 16, MACHINE, top=1)


def test_a_session_ends_in_the_middle_of_a_part() -> None:
    """What was not whole is left out, and the answer says that it is not complete."""
    room = SYSTEM | {"mem1": SYSTEM["mem1"] | {"GiB": 1e15}, "mem2": SYSTEM["mem2"] | {"GiB": 1e15}}
    sizes = APPLICATION | {"hidden": 5040, "feedforward": 5040, "seq_size": 5040, "attn_heads": 16}
    search = CalculonSearch(
        application=calculon.Application(**sizes),
        system=load_document(calculon.System, room),
        space=Space(num_procs=8, max_batch=5040),
        asked=SearchSettings(frontier=True),
    )
    session = Session(searches=[search])
    session.start()
    time.sleep(0.4)
    begin_s = time.process_time()
    session.stop()
    assert session.over.wait(60)
    assert time.process_time() - begin_s < 1.0
    session.finish()
    (answer,) = session.answers
    assert session.stopped
    assert not answer.complete
