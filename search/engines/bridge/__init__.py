"""Megatron-Bridge: its recipes and configurations as runs of Megatron-Core."""
