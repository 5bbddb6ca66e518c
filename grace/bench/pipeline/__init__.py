"""``grace bench pipeline``: whether the planned cut is the fastest, and steps take what is predicted."""
