"""The compiled engines of the analytic models."""

from __future__ import annotations

from typing import Any

from autopar.errors import InstallError

try:
    import _autopar_core as _core
except ImportError as error:  # pragma: no cover - depends on the installation
    raise InstallError(
        f"the C++ core is not built; run `make build` in a checkout, or reinstall autopar ({error})"
    ) from error

__all__ = ["calculon", "tensor2d"]

calculon: Any = _core.calculon
tensor2d: Any = _core.tensor2d
