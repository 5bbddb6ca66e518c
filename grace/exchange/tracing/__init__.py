"""Traces of training runs: events are recorded during a run, and summarized afterwards."""
