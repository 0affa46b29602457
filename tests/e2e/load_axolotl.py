"""Prints the keys of axolotl's configuration classes, which are read without importing them.

Run by `test_fine_tuning_packages.py` with a Python that has axolotl.
"""

import ast
import importlib.util
import json
from pathlib import Path

spec = importlib.util.find_spec("axolotl")
keys: dict[str, list[str]] = {}
for path in sorted((Path(spec.origin).parent / "utils" / "schemas").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            keys[node.name] = [one.id for one in fields if isinstance(one, ast.Name)]
print("RESULT " + json.dumps(keys))
