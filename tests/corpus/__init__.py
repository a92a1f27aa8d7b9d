"""Faults and harmless changes with known answers, for tests and benchmarks."""
