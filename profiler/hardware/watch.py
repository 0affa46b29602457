"""Watches a run from a thread of its own, so that a hung peer or a signal ends it in order.

The main thread of a rank spends its time inside collectives, where neither Python signal handlers
nor timeouts of ours run. Every rank therefore has a thread that tells the others twice a second
how far its main thread is, and rank 0's thread ends the run when that stops: it names who is
missing, keeps what was measured, and makes every process exit.
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Trouble", "Watch"]

_BEAT_S = 0.5
"""Seconds between two signs of life of a rank."""
_SILENT_S = 3.0
"""A rank whose sign of life does not change for so long has stopped."""
_PATIENCE_S = 15.0
"""How much longer than rank 0 the others wait before they give up on their own."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Why a run ends early."""

    sentence: str
    """What happened, with rank and host where they are known."""
    exit_code: int
    during: str
    """What the main thread was doing."""
    is_input_error: bool = False
    """True when the sentence alone is for the user: nothing is wrong with the machines."""


class Watch:
    """The watching thread of one rank.

    `finish` is called once, on rank 0 or on the first rank that is left, before its process
    exits; it records and reports the trouble.
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
    ) -> None:
        self._store = store
        self._rank = rank
        self._hosts = hosts
        self._pids = pids
        self._silent: list[int] = []
        self._timeout_s = timeout_s if rank == 0 else timeout_s + _PATIENCE_S
        self._finish = finish
        self._step = 0
        self._during = "starting"
        self._since_s = time.monotonic()
        self._beats = 0
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to watch; signals that end a program are handled here from now on."""
        for number in _SIGNALS:
            signal.signal(number, _noted_by_the_thread)
        # The handler itself waits for the main thread; the byte on the pipe does not.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()

    def step(self, during: str) -> None:
        """Note that the main thread begins `during`, which must end within the timeout."""
        self._step += 1
        self._during = during
        self._since_s = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """End the run because of an error of the main thread; does not return."""
        self._error = error
        os.write(self._writer, b"\0")
        self._thread.join()
        os._exit(1)  # only if the thread itself broke

    def close(self) -> None:
        """Stop watching at the regular end of a run."""
        self._closed.set()
        os.write(self._writer, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                ready, _, _ = select.select([self._reader], [], [], _BEAT_S)
                numbers = os.read(self._reader, 64) if ready else b""
                if self._closed.is_set():
                    return
                self._beat()
                received = [n for n in numbers if n]
                if self._error is not None:
                    self._end(self._on_error(self._error))
                elif received:
                    self._end(self._on_signal(signal.Signals(received[0])))
                elif time.monotonic() - self._since_s > self._timeout_s:
                    self._end(self._on_timeout())
                elif self._rank:
                    self._exit_if_ended()
        except Exception as error:  # the store is gone, and the launcher with it
            self._leave(
                Trouble(
                    sentence="the launcher (torchrun) of the first host stopped answering "
                    f"({str(error).splitlines()[0]})",
                    exit_code=1,
                    during=self._during,
                )
            )

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", json.dumps([self._beats, self._step]))

    def _on_error(self, error: BaseException) -> Trouble:
        if isinstance(error, AutoparError):
            return Trouble(
                sentence=str(error),
                exit_code=error.exit_code,
                during=self._during,
                is_input_error=True,
            )
        first = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {first[0] if first else ''}"
        self._store.set(f"error/{self._rank}", text)
        missing = self._missing() if self._rank == 0 else ""
        said = self._errors() or text
        return Trouble(sentence=missing or said, exit_code=1, during=self._during)

    def _on_signal(self, number: signal.Signals) -> Trouble:
        self._store.set(f"error/{self._rank}", f"received {number.name}")
        # A launcher ends every rank when one of them dies: find out which it was.
        missing = self._missing() if self._rank == 0 and number == signal.SIGTERM else ""
        if missing:
            return Trouble(sentence=missing, exit_code=1, during=self._during)
        others = self._errors(signals=False) if number == signal.SIGTERM else ""
        return Trouble(
            sentence=others or f"interrupted ({number.name})",
            exit_code=1 if others else 128 + number,
            during=self._during,
        )

    def _on_timeout(self) -> Trouble:
        missing = self._missing()
        return Trouble(
            sentence=missing
            or f"no rank finished {self._during} within {self._timeout_s:g} s, though all of them "
            "answer: the network or the communication library hangs",
            exit_code=1,
            during=self._during,
        )

    def _errors(self, *, signals: bool = True) -> str:
        """Return what ranks reported before they stopped, the first of them."""
        for rank in range(len(self._hosts)):
            if self._store.check([f"error/{rank}"]):
                text = self._store.get(f"error/{rank}").decode()
                if signals or not text.startswith("received "):
                    return f"{self._name(rank)}: {text}"
        return ""

    def _missing(self) -> str:
        """Return the sentence that names the ranks that are gone or behind, '' if none is.

        Waits until a rank that still works has had the time for a sign of life.
        """
        ranks = range(len(self._hosts))
        first = [self._read_beat(rank) for rank in ranks]
        until_s = time.monotonic() + _SILENT_S
        last = first
        while time.monotonic() < until_s and not all(
            b[0] > a[0] for a, b in zip(first, last, strict=True)
        ):
            time.sleep(_BEAT_S / 5)
            self._beat()
            last = [self._read_beat(rank) for rank in ranks]
        self._silent = [r for r in ranks if last[r][0] <= first[r][0]]
        if self._silent:
            return f"{self._names(self._silent)} stopped answering"
        furthest = max(step for _, step in last)
        behind = [r for r in ranks if last[r][1] < furthest]
        if behind and len(behind) < len(ranks):
            return f"{self._names(behind)} did not reach this operation, the others wait in it"
        return ""

    def _read_beat(self, rank: int) -> tuple[int, int]:
        if not self._store.check([f"beat/{rank}"]):
            return 0, 0
        beats, step = json.loads(self._store.get(f"beat/{rank}"))
        return int(beats), int(step)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self._hosts[rank]}"

    def _names(self, ranks: list[int]) -> str:
        named = ", ".join(self._name(rank) for rank in ranks[:4])
        return named + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")

    def _end(self, trouble: Trouble) -> None:
        """Report the trouble once and exit; the others wait for rank 0 to do so."""
        if self._rank:
            until_s = time.monotonic() + _PATIENCE_S
            before = self._read_beat(0)
            silent_since_s = time.monotonic()
            while time.monotonic() < until_s:
                self._beat()
                self._exit_if_ended()
                if (now := self._read_beat(0)) != before:
                    before, silent_since_s = now, time.monotonic()
                if time.monotonic() - silent_since_s > _SILENT_S + _BEAT_S:
                    break
                time.sleep(_BEAT_S / 5)
            self._silent = [0]
            trouble = Trouble(
                sentence=f"{self._name(0)} stopped answering", exit_code=1, during=self._during
            )
            # of those that are left the first one speaks
            if self._store.add("speaker", 1) > 1:
                os._exit(1)
        self._leave(trouble)

    def _leave(self, trouble: Trouble) -> None:
        try:
            self._finish(trouble)
            if self._rank == 0:
                self._store.set("end", json.dumps([trouble.exit_code, self._silent]))
                time.sleep(2 * _BEAT_S)  # the others read it before the launcher ends them
            self._kill_silent()
        finally:
            os._exit(trouble.exit_code)

    def _exit_if_ended(self) -> None:
        """Exit as rank 0 does, if it has ended the run."""
        if self._store.check(["end"]):
            exit_code, self._silent = json.loads(self._store.get("end"))
            self._kill_silent()
            os._exit(int(exit_code))

    def _kill_silent(self) -> None:
        """Kill the ranks of this launcher that no longer answer: it would wait long for them."""
        for rank in self._silent:
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path(f"/proc/{self._pids[rank]}/stat").read_text(encoding="utf-8")
                # the command's name, in brackets, may contain anything
                parent = int(stat.rpartition(")")[2].split()[1])
                if rank != self._rank and parent == os.getppid():
                    os.kill(self._pids[rank], signal.SIGKILL)


def _noted_by_the_thread(number: int, frame: FrameType | None) -> Any:
    """Do nothing: the thread reads the signal from the pipe."""
