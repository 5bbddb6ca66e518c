"""The tests; ranks import them by their names."""
