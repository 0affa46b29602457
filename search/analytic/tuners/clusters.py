"""Connects to Ray, which is an optional extra, and lets go of it again."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from autopar.errors import InputError, InstallError

__all__ = ["LOCAL", "cluster"]

LOCAL = "local"
_KNOCK_S = 10.0


@contextlib.contextmanager
def cluster(address: str, cpus: int) -> Iterator[Any]:
    """Yield the module `ray`, connected; a connection that exists already is used and kept.

    address : of a cluster, 'auto' for the one of this machine, or 'local' to start workers here.
    cpus : worker processes of a local one.

    Raises
    ------
    InstallError: Ray is not installed.
    InputError: nothing answers at the address.
    """
    # Nothing is reported to anybody; also for processes that Ray starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The answer of a release to come, and the end of a warning on machines without accelerators.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise InstallError(
            f"Ray is needed for this and cannot be imported ({error}); "
            "`pip install 'autopar[ray]'` installs it"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
        where.update(num_cpus=cpus, include_dashboard=False)
    try:
        _knock(address)
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--ray {address}: no Ray cluster answers ({str(error).splitlines()[0]:.120}); "
            "start one with `ray start --head`, or use --ray local"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S):
            pass
