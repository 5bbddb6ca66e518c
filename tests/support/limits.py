"""How long a test waits for what must come."""

HANGS = 900.0
"""Seconds after which something that has not come is taken to hang. No test is expected to come near it, on however
busy a machine: it ends waiting, and decides nothing. It lies below pytest's own limit for a test."""
