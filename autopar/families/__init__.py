"""What published files say of an architecture: the families of Hugging Face's `config.json`."""
