"""Common parts of several benchmarks."""
