"""Writes the table of default configurations of transformers with the parameters of their models.

`python -m tests.data.defaults` needs torch and transformers. Each causal language model is built
from its default configuration on the device `meta`; a multimodal one from its text part. Families
whose default cannot be built are not in the table.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent / "transformers_defaults.json.gz"
_UNREAD = ("transformers_version", "architectures", "dtype", "vision_config", "audio_config")
"""Keys of a configuration that no reader uses."""


def text_of(config: Any) -> Any:
    """Return the configuration of the text model."""
    return config.get_text_config(decoder=True)


def counted(config: Any) -> int:
    """Return the parameters of the causal language model of a configuration, tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum({id(one): one.numel() for one in model.parameters()}.values())


def main() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    columns: dict[str, list[Any]] = {"family": [], "parameters": [], "config": []}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = transformers.CONFIG_MAPPING[family]()
            number = counted(text_of(config))
        except Exception as error:  # any fault of a default means that there is no such model
            print(f"{family}: {type(error).__name__}: {error}")
            continue
        content = json.loads(config.to_json_string(use_diff=False))
        for key in _UNREAD:
            content.pop(key, None)
        for name, cell in zip(columns, (family, number, content), strict=True):
            columns[name].append(cell)
    document = {
        "what": "default configurations of causal language models, with their parameters",
        "source": f"transformers {transformers.__version__}",
        "obtained": "by building each model on torch's device `meta`",
        "units": "parameters: number, tied ones once",
        "tables": {"models": columns},
    }
    text = json.dumps(document, separators=(",", ":"))
    TABLE.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))


if __name__ == "__main__":
    main()
