"""Megatron-Bridge: its recipes and configurations as launches of Megatron-Core."""
