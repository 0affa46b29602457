"""Model families: architectures read from the `config.json` of Hugging Face models."""
