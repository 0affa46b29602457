"""Readers of launch files for all engines: shell scripts, YAML, TOML and JSON.

Callers import from this package; its modules are internal.
"""

from __future__ import annotations

from search.engines.text.files import (
    Configuration,
    arguments_in,
    dump_yaml,
    flags_of,
    flags_of_document,
    load_yaml,
    named_file,
    named_path,
    named_text,
    read_configuration,
    refuse_other,
)
from search.engines.text.others import problem_of, problem_of_text
from search.engines.text.shell import given_arguments, script_command
from search.engines.text.shell_values import Command

__all__ = [
    "Command",
    "Configuration",
    "arguments_in",
    "dump_yaml",
    "flags_of",
    "flags_of_document",
    "given_arguments",
    "load_yaml",
    "named_file",
    "named_path",
    "named_text",
    "problem_of",
    "problem_of_text",
    "read_configuration",
    "refuse_other",
    "script_command",
]
