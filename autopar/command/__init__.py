"""Infrastructure of commands: option definitions, parsing, console and JSON answers."""
