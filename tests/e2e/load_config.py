"""Reads the models in the folders named on the command line with transformers.

Run by `test_written_packages.py` with a Python that has transformers; prints their sizes.
"""

import json
import sys

from transformers import AutoConfig

results = []
for folder in sys.argv[1:]:
    config = AutoConfig.from_pretrained(folder)
    heads = config.num_attention_heads
    results.append(
        {
            "kind": type(config).__name__,
            "sizes": [
                config.num_hidden_layers,
                config.hidden_size,
                config.intermediate_size,
                config.vocab_size,
            ],
            "heads": [
                heads,
                config.num_key_value_heads,
                getattr(config, "head_dim", None) or config.hidden_size // heads,
            ],
            "tied": config.tie_word_embeddings,
        }
    )
print("RESULT " + json.dumps(results))
