"""Composes the settings of verl's trainer from the words of the folders on the command line.

Run by `test_fine_tuning_packages.py` with a Python that has verl. Each folder has the overrides in
`words.json`. Prints, for each folder, the settings that it would train with.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

home = Path(find_spec("verl").origin).parent / "trainer" / "config"
results = []
with initialize_config_dir(str(home), version_base=None):
    for folder in sys.argv[1:]:
        words = json.loads((Path(folder) / "words.json").read_text())
        found = compose("sft_trainer_engine", words)
        parts = {key: found[key] for key in ("data", "model", "engine", "optim", "trainer")}
        results.append({key: OmegaConf.to_container(one) for key, one in parts.items()})
print("RESULT " + json.dumps(results))
