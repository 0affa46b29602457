"""Write docs/schemas from the records: the code is the one place that knows the formats."""

from __future__ import annotations

import json
from pathlib import Path

from autopar.documents.schemas import json_schemas

FOLDER = Path(__file__).resolve().parent / "schemas"


def main() -> None:
    """Rewrite the folder; files of documents that no longer exist are removed."""
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.schema.json"):
        stale.unlink()
    for role, schema in json_schemas().items():
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        (FOLDER / f"{role}.schema.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
