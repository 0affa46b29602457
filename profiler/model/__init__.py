"""Measures a model: time and memory of its layers, exactly without a GPU or on a device."""
