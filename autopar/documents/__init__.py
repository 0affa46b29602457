"""File formats of profiles, models, plans and calibrations: reading, validation and writing.

Documented names and keys in this package are those of Galvatron's files, as described in
docs/reference/files.md.
"""
