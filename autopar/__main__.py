"""`python -m autopar`: the command where scripts of the environment are not on the path."""

from __future__ import annotations

from autopar.cli import main

if __name__ == "__main__":
    main()
