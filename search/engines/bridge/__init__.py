"""Megatron-Bridge: reader, writer and recipes; its runs are those of Megatron-Core."""
