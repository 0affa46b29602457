"""Files that launches are written in, whatever the engine: scripts, YAML, JSON.

Callers import from here; which file holds what is this package's own affair.
"""

from __future__ import annotations

from search.engines.text.files import (
    Configuration,
    arguments_in,
    dump_yaml,
    flags_of,
    flags_of_document,
    load_yaml,
    read_configuration,
)
from search.engines.text.shell import script_command
from search.engines.text.shell_values import Command

__all__ = [
    "Command",
    "Configuration",
    "arguments_in",
    "dump_yaml",
    "flags_of",
    "flags_of_document",
    "load_yaml",
    "read_configuration",
    "script_command",
]
