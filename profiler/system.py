"""What the operating system and nvidia-smi say of a machine; what they do not know is None."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

from profiler.metadata import Metadata

__all__ = ["cpu_name", "driver_version", "first_line", "gpu_clocks", "nvidia_smi"]

_TOOL_TIMEOUT_S = 10.0  # without the persistence mode the driver starts first


def gpu_clocks(uuid: str | None) -> Metadata:
    """Return clocks, power limit and persistence of a GPU; None where they are unknown."""
    keys = ("sm_clock_hz", "sm_clock_max_hz", "memory_clock_hz", "power_limit_w", "persistence")
    query = "clocks.current.sm,clocks.max.sm,clocks.current.memory,power.limit,persistence_mode"
    found: Metadata = dict.fromkeys(keys)
    if uuid is None:
        return found
    selected = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    text = nvidia_smi(f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", selected)
    values = [part.strip() for part in (text or "").split(",")]
    if len(values) == len(keys):
        for key, value in zip(keys, values, strict=True):
            if re.fullmatch(r"\d+(\.\d+)?", value):
                found[key] = float(value) * (1e6 if key.endswith("_hz") else 1.0)
            elif key == "persistence":
                found[key] = value
    return found


def driver_version() -> str | None:
    """Return the version of the GPU driver, None where there is none."""
    known = first_line(Path("/sys/module/nvidia/version"))
    text = known or nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def nvidia_smi(*arguments: str) -> str | None:
    """Return what nvidia-smi says, None where it is absent or says nothing in time."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """Return the model of this machine's CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def first_line(path: Path) -> str | None:
    """Return the first line of a file, None where it is absent or empty."""
    try:
        return path.read_text(encoding="ascii").split("\n")[0].strip() or None
    except (OSError, UnicodeDecodeError):
        return None
