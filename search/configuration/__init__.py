"""Files that launches are written in, whatever the engine: scripts, YAML, JSON.

Callers import from here; which file holds what is this package's own affair.
"""

from __future__ import annotations

from search.configuration.files import (
    Configuration,
    dump_yaml,
    flags_of,
    load_yaml,
    read_configuration,
)
from search.configuration.shell import Command, script_command

__all__ = [
    "Command",
    "Configuration",
    "dump_yaml",
    "flags_of",
    "load_yaml",
    "read_configuration",
    "script_command",
]
