"""Parts of the step time: operations, experts, adapters, data parallelism, the optimizer."""
