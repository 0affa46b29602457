"""Training settings beyond sizes and degrees, shared by memory and time.

These are adapters on frozen weights, throughput, MoE routing skew, and the file of a uniform plan.
"""
