"""Published cases of the public peer: plan, fit and CPU seconds of both, compared term by term.

`python -m benchmarks.bench_galvatron_cases [--cases DIR] [--repeats N] [--json LEDGER] [--command]`
The answers are in `tests/data`; the profiles that they were made from are the peer's own files.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.run.plan import Plan, Prediction
from autopar.units import GIB
from benchmarks.metadata import ROOT, Timed, append, timed
from search.planning.cost.model import CostModel
from search.planning.layered.prediction import SearchResult
from search.planning.session import Session, evaluate_file, open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec
from tests.data.read import galvatron_answers
from tests.oracles.galvatron_terms import Peer, PeerV24, attribution

__all__ = ["Case", "Outcome", "answer", "inputs_of", "main", "open_case", "read_cases", "terms_of"]

CASES = ROOT.parent / "shared" / "cases" / "galvatron"
DATA = ROOT / "tests" / "data"
DIFFERENCE = 0.05
"""Relative difference above which a case is explained term by term."""
_SWITCHES = {"disable_fsdp": "disable_sdp"}
_BY_NAME = {
    "3d": ("disable_sdp", "disable_sp", "disable_ckpt"),
    "dptp": ("disable_pp", "disable_sdp", "disable_sp", "disable_ckpt"),
    "full": (),
    "fg0": (),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published answer and its search options."""

    engine: str
    name: str
    options: SearchOptions
    step_time_s: float | None
    cpu_s: float | None
    strategy_file: Mapping[str, object] | None
    error: str | None

    @property
    def key(self) -> str:
        """Engine and name, unique together."""
        return f"{self.engine}:{self.name}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Our answer to a case, and the peer's plan in our model."""

    result: SearchResult
    session: Session
    peer_plan: Plan | None
    peer: Prediction | None

    @property
    def problems(self) -> tuple[str, ...]:
        """Errors of a wrong answer; empty if all is well."""
        best, found = self.result.prediction, []
        if best is None:
            return () if self.peer is None or not self.peer.fits else ("we found no plan",)
        if self.result.status != "optimal":
            found.append(f"status {self.result.status}")
        if not (best.legal and best.fits):
            found.append("; ".join(best.problems))
        if not best.replay_s <= best.step_time_s * (1 + 1e-12):
            found.append(f"T {best.step_time_s} s is below the replay {best.replay_s} s")
        if not best.step_time_s <= best.replay_s * 1.05:
            found.append(f"T {best.step_time_s} s is over 5 % above the replay {best.replay_s} s")
        usable = self.peer is not None and self.peer.legal and self.peer.fits
        if usable and self.peer and best.step_time_s > self.peer.step_time_s * (1 + 1e-12):
            found.append(f"the peer's plan is faster: {self.peer.step_time_s} s")
        return tuple(found)


def read_cases(folder: Path) -> list[Case]:
    """Return the cases that the folder of published figures holds, in its order."""
    return [
        Case(
            engine=entry["engine"],
            name=entry["case"],
            options=_options(entry["case"], entry["options"]),
            step_time_s=entry["step_s"],
            cpu_s=entry["cpu_s"],
            strategy_file=entry["strategy_file"],
            error=entry["error"],
        )
        for entry in galvatron_answers(folder)
    ]


def _options(name: str, given: Sequence[str] | None) -> SearchOptions:
    """Return the options of a case; without recorded ones, those implied by its name."""
    values: dict[str, Any] = {"default_dp_type": "zero2", "sp_space": "tp+sp", "top": 0}
    values["time_profile_mode"] = "batch"
    # the peer's recipe: 16 bytes of model states per parameter
    values["fp32_gradients"] = False
    if given is None:
        match = re.fullmatch(r".*_1x8_(\d+)g_bsz(\d+)_(3d|dptp|full|fg0)", name)
        if match is None:
            raise ValueError(f"the case {name!r} does not say its options")
        given = [f"memory_constraint={match[1]}", f"settle_bsz={match[2]}"]
        given += [f"{switch}=1" for switch in _BY_NAME[match[3]]]
        given += ["fine_grained_mode=0"] if match[3] == "fg0" else []
    for item in given:
        key, value = item.split("=")
        if key == "memory_constraint":
            values["memory_constraint_bytes"] = int(value) * float(GIB)
        elif key in ("settle_bsz", "settle_chunk"):
            values[key] = int(value)
        elif key == "time_profile_mode":
            values[key] = value
        elif key == "fine_grained_mode" or key.startswith("disable_"):
            values[_SWITCHES.get(key, key)] = value == "1"
        elif item != "seq_length=2048":
            raise ValueError(f"the case {name!r} has the unknown option {item!r}")
    return SearchOptions(**values)


def inputs_of(folder: Path) -> InputSpec:
    """Return the paths of the published profiles of llama2-7b on 1 x 8 A100."""
    return InputSpec(
        num_layers=(32,),
        hidden_size=(4096,),
        seq_length=(2048,),
        memory_profiling_path=str(folder / "model"),
        time_profiling_path=str(folder / "model"),
        allreduce_bandwidth_config_path=str(folder / "hardware"),
        bandwidth_unit="MiB/ms",
    )


def open_case(folder: Path, case: Case) -> Session:
    """Return the session of a case."""
    return open_session(inputs_of(folder), case.options)


def answer(folder: Path, case: Case) -> Outcome:
    """Return our answer, starting from the files, and the peer's plan priced by our model."""
    session = open_case(folder, case)
    result = session.planner.solve()
    plan = prediction = None
    if case.strategy_file is not None:
        plan, prediction = evaluate_file(case.strategy_file, session)
    return Outcome(result=result, session=session, peer_plan=plan, peer=prediction)


def terms_of(case: Case, outcome: Outcome) -> list[tuple[str, float, float]]:
    """Return (term, change of our T when only it is the peer's, change in turn), in seconds.

    The changes in turn add up to the peer's figure by its published formulas minus our T.
    """
    if outcome.peer_plan is None or outcome.peer is None:
        return []
    session = outcome.session
    documents = (session.spec, session.profile, session.hardware)
    cost = CostModel(*documents, session.options)
    peer = Peer(*documents)
    if case.engine == "v2.4.0":
        # the two cases without Ulysses were searched in its `tp` space
        peer = PeerV24(*documents, tensor_space=session.options.disable_sp)
    before = start = outcome.peer.step_time_s
    found = []
    for term, alone, after in attribution(cost, peer, outcome.peer_plan):
        if term == "samples":
            start = alone
            found.append((term, after - before, after - before))
        else:
            found.append((term, alone - start, after - before))
        before = after
    return found


def command_options(folder: Path, case: Case) -> list[str]:
    """Return the options of `autopar-search` for a case."""
    model, hardware = str(folder / "model"), str(folder / "hardware")
    options = case.options
    words = [
        *("--num-layers", "32", "--hidden-size", "4096", "--seq-length", "2048"),
        *("--memory-profiling-path", model, "--time-profiling-path", model),
        *("--allreduce-bandwidth-config-path", hardware, "--bandwidth-unit", "MiB/ms"),
        *("--default-dp-type", "zero2", "--time-profile-mode", "batch"),
        *("--pipeline-type", "pipedream_flush", "--sp-space", "tp+sp"),
        *("--memory-constraint", f"{options.memory_constraint_bytes / GIB:g}"),
        *("--settle-bsz", str(options.settle_bsz)),
        "--no-fp32-gradients",
        *("--fine-grained-mode", str(int(options.fine_grained_mode))),
    ]
    if options.settle_chunk is not None:
        words += ["--settle-chunk", str(options.settle_chunk)]
    for name in ("pp", "sp", "sdp", "ckpt"):
        if getattr(options, f"disable_{name}"):
            words += [f"--disable-{name}"]
    return words


def command_cpu_s(folder: Path, case: Case) -> float:
    """Return the CPU seconds of the whole command, interpreter and imports included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "from autopar.cli import search; search()"
    with tempfile.TemporaryDirectory() as out:
        options = [*command_options(folder, case), "--json", "-", "--output-config-path", out]
        subprocess.run(
            [sys.executable, "-c", code, *options], cwd=ROOT, check=True, capture_output=True
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _summary(plan: Plan) -> str:
    counted: dict[str, int] = {}
    for s in plan.layers:
        name = ("u" if s.ulysses else "t") + str(s.tp) + ("z" if s.zero3 else "")
        name += "c" if s.checkpoint else ""
        counted[name] = counted.get(name, 0) + 1
    layers = " ".join(f"{n}x{name}" for name, n in counted.items())
    return f"p{plan.num_stages} m{plan.num_microbatches} {layers}"


def _print(case: Case, outcome: Outcome, times: Timed, command_s: float | None) -> None:
    best, plan = outcome.result.prediction, outcome.result.plan
    asked = f"{case.options.memory_constraint_bytes / GIB:g} GiB, G={case.options.settle_bsz}"
    print(f"\n{case.key} ({asked})")
    cpu = f"{times.median_cpu_s:.3f} CPU s in process"
    cpu += f", {command_s:.2f} CPU s as a command" if command_s is not None else ""
    cpu += f", the peer {case.cpu_s} CPU s" if case.cpu_s is not None else ""
    if best is None or plan is None:
        print(f"  ours  {outcome.result.status}")
    else:
        used = max(s.reserved_bytes for s in best.stages) / GIB
        print(
            f"  ours  T {best.step_time_s:.4f} s, replay {best.replay_s:.4f} s, "
            f"{best.samples_per_s:.3f} samples/s, {used:.2f} GiB: {_summary(plan)}"
        )
    print(f"  {cpu}")
    if outcome.peer is None or case.step_time_s is None:
        print(f"  peer  {'no plan found' if case.error is None else case.error}")
        return
    peer = outcome.peer
    used = max(s.reserved_bytes for s in peer.stages) / GIB
    legal = "legal" if peer.legal else "ILLEGAL"
    fits = "fits" if peer.fits else "does not fit"
    print(
        f"  peer  T {peer.step_time_s:.4f} s in our model, {case.step_time_s:.4f} s by itself, "
        f"{legal}, {fits} ({used:.2f} GiB)"
    )
    if best is not None:
        ahead = peer.step_time_s / best.step_time_s - 1
        print(f"  throughput of ours over the peer's plan, in our model: {ahead:+.1%}")
    difference = case.step_time_s - peer.step_time_s
    if abs(difference) <= DIFFERENCE * peer.step_time_s:
        return
    terms = terms_of(case, outcome)
    explained = sum(in_turn for _, _, in_turn in terms)
    print(f"  its figure differs by {difference:+.4f} s ({difference / peer.step_time_s:+.1%}):")
    for term, alone, in_turn in terms:
        if max(abs(alone), abs(in_turn)) > 5e-4:
            print(f"    {term:15s} {alone:+8.4f} s alone, {in_turn:+8.4f} s in turn")
    print(f"    {'unexplained':15s} {difference - explained:+8.4f} s")


def main() -> int:
    """Print every case; return 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", type=Path, default=CASES, help="folder of the peer's hardware and model files"
    )
    parser.add_argument("--answers", type=Path, default=DATA, help="folder of tests.data.make")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    parser.add_argument("--command", action="store_true", help="time the command as well")
    arguments = parser.parse_args()
    if not (arguments.cases / "hardware").is_dir():
        print(f"skipped: no folder hardware in {arguments.cases}; give --cases DIR")
        return 0
    rows, failed = [], 0
    for case in read_cases(arguments.answers):
        outcome = answer(arguments.cases, case)

        def search(case: Case = case) -> SearchResult:
            return open_case(arguments.cases, case).planner.solve()

        _, times = timed(search, arguments.repeats)
        command_s = command_cpu_s(arguments.cases, case) if arguments.command else None
        _print(case, outcome, times, command_s)
        for problem in outcome.problems:
            failed += 1
            print(f"  WRONG: {problem}")
        best, peer = outcome.result.prediction, outcome.peer
        rows.append(
            {
                "case": case.key,
                "cpu_s": times.cpu_s,
                "command_cpu_s": command_s,
                "peer_cpu_s": case.cpu_s,
                "step_time_s": None if best is None else best.step_time_s,
                "replay_s": None if best is None else best.replay_s,
                "peer_plan_step_time_s": None if peer is None else peer.step_time_s,
                "peer_plan_legal": None if peer is None else peer.legal,
                "peer_plan_fits": None if peer is None else peer.fits,
                "peer_step_time_s": case.step_time_s,
                "terms": terms_of(case, outcome),
            }
        )
    append(arguments.json, "galvatron_cases", {"cases": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
