"""Megatron-LM: its arguments, rules, runs and plans."""
