"""Megatron-LM: reader, writer and constraints of its arguments, and conversion of plans."""
