"""The compiled module, checked to be of this version of the package."""

from __future__ import annotations

from autopar.errors import InstallError

try:
    import _autopar_core as core
except ImportError as error:  # pragma: no cover - depends on the installation
    raise InstallError(
        f"the C++ core is not built; run `make build` in a checkout, or reinstall autopar ({error})"
    ) from error

__all__ = ["ABI_VERSION", "core"]

# History of the interface between Python and C++; both sides carry the number.
#   1  the planner
#   2  the closed-form engines
ABI_VERSION = 2
if core.ABI_VERSION != ABI_VERSION:  # pragma: no cover - depends on the installation
    raise InstallError(
        f"the C++ core has interface version {core.ABI_VERSION}, this package needs "
        f"{ABI_VERSION}; run `make build`"
    )
