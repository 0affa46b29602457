"""Memory and step time of a training run, estimated bottom-up without measured profiles."""
