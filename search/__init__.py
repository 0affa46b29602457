"""Decides: from profile documents to the fastest plan that fits; numpy and the C++ core, never torch."""
