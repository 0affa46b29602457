"""Fine-tuning programs that train runs of accelerate and DeepSpeed."""
