"""How the ranks of a run find each other: the launcher's store, and what each says of itself."""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any

from autopar.errors import InputError
from profiler.environment import RankInfo

__all__ = ["connect", "introduce"]

_POLL_S = 0.05
_MARGIN_S = 10.0
"""The others wait so much longer than rank 0, which says who is missing."""
_REMEDY = (
    "start torchrun on every node, with the same --nnodes and --rdzv-endpoint, or raise --timeout"
)


def connect(timeout: timedelta) -> tuple[Any, Any, int, int]:
    """Return two connections to the launcher's store, the rank and the world size.

    Two, because a wait on one of them would keep the watching thread from the other.

    Raises
    ------
    InputError: there is no store.
    """
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        # torch before 2.8 cannot clone, but connect again
        again = getattr(store, "clone", lambda: next(rendezvous("env://", timeout=timeout))[0])
        return store, again(), rank, world
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the ranks cannot meet in the launcher's store at {where} ({reason}); {_REMEDY}"
        ) from None


def introduce(
    store: Any, own: RankInfo, world: int, timeout: timedelta
) -> tuple[list[RankInfo], str]:
    """Return what every rank says of itself, and a name that only this start of the ranks has.

    A launcher that starts its ranks again keeps the store, with all that the earlier ones wrote,
    and its count of restarts differs between hosts. So rank 0 names the start, and the others take
    a name for valid once they find themselves under it.

    Raises
    ------
    InputError: ranks are missing.
    """
    token = secrets.token_hex(8)
    said = json.dumps({**own.to_dict(), "token": token})
    if own.rank == 0:
        store.set(f"{token}/info/0", said)
        store.set("start", token)
        return _collected(store, token, world, timeout), token
    until_s = time.monotonic() + timeout.total_seconds() + _MARGIN_S
    start = ""
    while time.monotonic() < until_s:
        if store.check(["start"]):
            found = store.get("start").decode()
            if found != start:
                start = found
                store.set(f"{start}/info/{own.rank}", said)
            if store.check([f"{start}/infos"]):
                entries = json.loads(store.get(f"{start}/infos"))
                if own.rank < len(entries) and entries[own.rank]["token"] == token:
                    return [RankInfo.from_dict(entry) for entry in entries], start
        time.sleep(_POLL_S)
    raise InputError(
        f"rank 0 of {world} did not start within {timeout.total_seconds() + _MARGIN_S:g} s; "
        f"{_REMEDY}"
    )


def _collected(store: Any, start: str, world: int, timeout: timedelta) -> list[RankInfo]:
    """Return what all ranks said under the name of a start, and tell them."""
    keys = [f"{start}/info/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timeout)
    except Exception:  # of different types, by store and by version
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        listed = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
        raise InputError(
            f"rank{'s' if len(absent) > 1 else ''} {listed} of {world} did not start within "
            f"{timeout.total_seconds():g} s; {_REMEDY}"
        ) from None
    entries = [json.loads(store.get(key)) for key in keys]
    store.set(f"{start}/infos", json.dumps(entries))
    return [RankInfo.from_dict(entry) for entry in entries]
