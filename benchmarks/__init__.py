"""Scripts that measure one thing each, for figures of BENCHMARKS.md."""
