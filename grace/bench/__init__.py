"""Benchmarks: what compression costs and what it saves, measured on real ranks."""
