"""Megatron-LM: its arguments, rules, launches and plans."""
