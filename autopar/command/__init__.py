"""What all commands share: options, exit codes, tables and pictures; no command itself."""

from __future__ import annotations

__all__: list[str] = []
