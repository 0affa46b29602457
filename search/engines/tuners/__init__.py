"""LLaMA-Factory, axolotl and ms-swift: fine-tuning runs of accelerate and DeepSpeed."""
