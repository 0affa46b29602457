"""LLaMA-Factory and axolotl: YAML for fine-tuning runs of accelerate and DeepSpeed."""
