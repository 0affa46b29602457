"""Watch thread of a run: ends it in order after a hang or a signal.

The main thread of a rank spends its time inside collectives, where neither Python signal handlers
nor Python timeouts run. Every rank therefore has a thread that publishes the progress of its main
thread twice a second. When progress stops, rank 0's thread ends the run: it reports the missing
ranks, keeps the measurements, and makes every process exit. A rank with a local error informs rank
0 and waits. Only if rank 0 is gone does the first rank that noticed report the failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.records import Record, replace

if TYPE_CHECKING:
    from torch.distributed import Store

_BEAT_S = 0.5
"""Seconds between two heartbeats of a rank."""
_SILENT_S = 3.0
"""Seconds without a new heartbeat after which a rank counts as stopped."""
_PATIENCE_S = 15.0
"""Seconds that other ranks wait for a live rank 0 to end the run, before they do so themselves."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Trouble(Record):
    """Reason for the early end of a run."""

    sentence: str
    """Description of the failure, with rank and host if known."""
    exit_code: int
    during: str
    """Activity of the main thread at that time; empty if the sentence says enough without it."""
    is_input_error: bool = False
    """True if the message is for the user only: no machine has failed."""


class Watch:
    """Watch thread of one rank.

    finish : callback that records and reports the trouble. It is called once before the process
        exits, on rank 0 or on the first remaining rank.
    pace : factor of all intervals except the timeout.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        hosts: Sequence[str],
        pids: Sequence[int],
        timeout_s: float,
        finish: Callable[[Trouble], None],
        pace: float = 1.0,
    ) -> None:
        self._store = store
        self._rank = rank
        self._hosts = hosts
        self._pids = pids
        self._silent: list[int] = []
        self._timeout_s = timeout_s
        self._finish = finish
        self._beat_s, self._silent_s = pace * _BEAT_S, pace * _SILENT_S
        self._patience_s = pace * _PATIENCE_S
        self._step = 0
        self._during = "starting"
        self._since_s = time.monotonic()
        self._beats = 0
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._reader, self._writer = os.pipe()
        # A signal handler must never block on a full pipe.
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread; from now on it handles signals that end a program."""
        for number in _SIGNALS:
            signal.signal(number, _noted_by_the_thread)
        # A Python handler runs only in the main thread; the byte in the pipe arrives at once.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()

    def step(self, during: str) -> None:
        """Note that the main thread begins `during`, which must end within the timeout."""
        self._step += 1
        self._during = during
        self._since_s = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """End the run because of an error in the main thread; does not return."""
        self._error = error
        os.write(self._writer, b"\0")
        self._thread.join()
        os._exit(1)  # only if the watch thread itself failed

    def close(self) -> None:
        """Stop watching at the regular end of a run."""
        self._closed.set()
        os.write(self._writer, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:  # the pipe has no reader any more
            signal.signal(number, signal.SIG_DFL)

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                ready, _, _ = select.select([self._reader], [], [], self._beat_s)
                numbers = os.read(self._reader, 64) if ready else b""
                # close() wakes the thread through this pipe.
                if self._closed.is_set():
                    return
                self._beat()
                # fail() and close() write zeros, signals write their numbers.
                received = [n for n in numbers if n]
                if self._error is not None:
                    self._end(self._on_error(self._error))
                elif received:
                    self._end(self._on_signal(signal.Signals(received[0])))
                elif time.monotonic() - self._since_s > self._timeout_s:
                    self._end(self._on_timeout(), may_go_on=True)
                elif self._rank:
                    self._exit_if_ended()
                elif self._store.check(["error/1"]):
                    self._end(self._on_report_of_others())
        except Exception as error:  # the store is gone, and the launcher with it
            if self._closed.is_set():  # normal if rank 0 has already left
                return
            reason = str(error).partition("\n")[0]
            said = f"the launcher (torchrun) of the first host stopped answering ({reason})"
            self._leave(self._trouble(said))

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", json.dumps([self._beats, self._step]))

    def _on_error(self, error: BaseException) -> Trouble:
        first = str(error).strip().splitlines()
        text, exit_code = f"{type(error).__name__}: {first[0] if first else ''}", 1
        if isinstance(error, AutoparError):
            text, exit_code = str(error), error.exit_code
            if self._rank == 0:
                return replace(self._trouble(text, exit_code), during="", is_input_error=True)
        self._report(text, exit_code, is_complete=isinstance(error, AutoparError))
        return self._on_report()

    def _on_signal(self, number: signal.Signals) -> Trouble:
        if self._rank:
            self._report(f"received {number.name}", 0)
        # A launcher ends all ranks when one dies: find out which one it was.
        if number == signal.SIGTERM and (found := self._cause()):
            return found
        return self._trouble(f"interrupted ({number.name})", 128 + number)

    def _on_report_of_others(self) -> Trouble:
        """Return the reported trouble, or Ctrl-C if it reaches this rank within two beats, too."""
        *_, exit_code, _ = self._reports()[0]
        if exit_code == 0:
            # Ctrl-C is typed for all ranks, and another one may be the first to see it
            ready, _, _ = select.select([self._reader], [], [], 2 * self._beat_s)
            if ready and signal.SIGINT in os.read(self._reader, 64):
                return self._on_signal(signal.SIGINT)
        return self._on_report()

    def _on_report(self) -> Trouble:
        """Return the cause of the first reported trouble, or the report itself."""
        rank, text, *_ = self._reports()[0]
        return self._cause() or self._trouble(f"interrupted: {self._name(rank)} {text}")

    def _on_timeout(self) -> Trouble:
        if found := self._cause():
            return found
        steps = [step for _, step in self._read_beats()]
        # All ranks count the same steps: a rank with fewer steps is not in this operation.
        behind = [rank for rank, step in enumerate(steps) if step < max(steps)]
        return self._trouble(
            f"{self._names(behind)} did not reach this operation, for which the others wait"
            if behind
            else (
                f"no rank finished {self._during} within {self._timeout_s:g} s, but "
                "all of them answer: the network or the communication library hangs"
            )
        )

    def _trouble(self, sentence: str, exit_code: int = 1) -> Trouble:
        return Trouble(sentence=sentence, exit_code=exit_code, during=self._during)

    def _report(self, text: str, exit_code: int, *, is_complete: bool = False) -> None:
        """Tell all ranks why this rank cannot continue.

        exit_code : 0 for a signal, which is no error.
        is_complete : whether the text names what failed and its remedy by itself.
        """
        # The store assigns the number, so that two reports have different keys.
        number = self._store.add("errors", 1)
        self._store.set(f"error/{number}", json.dumps([self._rank, text, exit_code, is_complete]))

    def _reports(self) -> list[tuple[int, str, int, bool]]:
        """Return (rank, text, exit code, whether the text is complete) by report, oldest first."""
        found: list[tuple[int, str, int, bool]] = []
        while self._store.check([key := f"error/{len(found) + 1}"]):
            rank, text, exit_code, is_complete = json.loads(self._store.get(key))
            found.append((int(rank), str(text), int(exit_code), bool(is_complete)))
        return found

    def _cause(self) -> Trouble | None:
        """Return the trouble of stopped ranks or of the first error; None if all is well.

        Waits long enough for every live rank to send a heartbeat.
        """
        first = last = self._read_beats()
        until_s = time.monotonic() + self._silent_s
        while time.monotonic() < until_s and not all(
            b[0] > a[0] for a, b in zip(first, last, strict=True)
        ):
            time.sleep(self._beat_s / 5)
            self._beat()
            # Compare counts, not times: the clocks of hosts may differ.
            last = self._read_beats()
        self._silent = [r for r, beat in enumerate(last) if beat[0] <= first[r][0]]
        if self._silent:
            return self._trouble(f"{self._names(self._silent)} stopped answering")
        for rank, text, exit_code, is_complete in self._reports():
            if exit_code:
                trouble = self._trouble(f"{self._name(rank)}: {text}", exit_code)
                return replace(trouble, during="") if is_complete else trouble
        return None

    def _read_beat(self, rank: int) -> tuple[int, int]:
        if not self._store.check([f"beat/{rank}"]):
            return 0, 0
        beats, step = json.loads(self._store.get(f"beat/{rank}"))
        return int(beats), int(step)

    def _read_beats(self) -> list[tuple[int, int]]:
        """Return (beats, step) by rank, with two requests for any number of ranks."""
        keys = [f"beat/{rank}" for rank in range(len(self._hosts))]
        if not self._store.check(keys):  # a rank has not sent its first heartbeat yet
            return [self._read_beat(rank) for rank in range(len(keys))]
        return [(beats, step) for beats, step in map(json.loads, self._store.multi_get(keys))]

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self._hosts[rank]}"

    def _names(self, ranks: list[int]) -> str:
        named = ", ".join(self._name(rank) for rank in ranks[:4])
        return named + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")

    def _end(self, trouble: Trouble, *, may_go_on: bool = False) -> None:
        """Report the trouble once and exit; other ranks wait for rank 0 to do so.

        may_go_on : True if the trouble is over once the main thread reaches its next step.
        """
        step = self._step
        until_s = time.monotonic() + self._patience_s
        before, silent_since_s = self._read_beat(0), time.monotonic()
        if 0 in self._silent:  # the wait for rank 0 is already over
            silent_since_s -= self._silent_s
        while self._rank and time.monotonic() < until_s:
            self._beat()
            self._exit_if_ended()
            if may_go_on and (self._step > step or self._closed.is_set()):
                self._silent = []
                return
            if (now := self._read_beat(0)) != before:
                before, silent_since_s = now, time.monotonic()
            silent = time.monotonic() - silent_since_s > self._silent_s + self._beat_s
            # Rank 0 sends no heartbeats while it writes and reports.
            if silent and not self._store.check(["ending"]):
                if 0 not in self._silent:
                    self._silent = [0]
                    trouble = self._trouble(f"{self._name(0)} stopped answering")
                break
            time.sleep(self._beat_s / 5)
        # Without rank 0, the first remaining rank reports.
        if self._rank and self._store.add("speaker", 1) > 1:
            os._exit(1)
        self._leave(trouble)

    def _leave(self, trouble: Trouble) -> None:
        try:
            with contextlib.suppress(Exception):  # the store itself may be gone
                if self._rank == 0:
                    self._store.set("ending", "")
            self._finish(trouble)
            if self._rank == 0:
                self._store.set("end", json.dumps([trouble.exit_code, self._silent]))
                time.sleep(2 * self._beat_s)  # time to read it before the launcher ends them
            # After the report, which must not wait for this.
            self._kill_silent()
        finally:
            os._exit(trouble.exit_code)

    def _exit_if_ended(self) -> None:
        """Exit with rank 0's exit code if it has ended the run."""
        if self._store.check(["end"]):
            exit_code, self._silent = json.loads(self._store.get("end"))
            self._kill_silent()
            os._exit(int(exit_code))

    def _kill_silent(self) -> None:
        """Kill stopped ranks of this launcher, which would otherwise wait long for them."""
        for rank in self._silent:
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path(f"/proc/{self._pids[rank]}/stat").read_text(encoding="utf-8")
                # The command name, in parentheses, may contain any character.
                parent = int(stat.rpartition(")")[2].split()[1])
                # On another host this process id belongs to an unrelated process.
                local = self._hosts[rank] == self._hosts[self._rank]
                if local and rank != self._rank and parent == os.getppid():
                    os.kill(self._pids[rank], signal.SIGKILL)


def _noted_by_the_thread(number: int, frame: FrameType | None) -> Any:
    """Do nothing: the watch thread reads the signal from the pipe."""
