"""accelerate, transformers and the architectures of Hugging Face configurations."""
