"""``grace bench pipeline``: a comparison of the planned cut with others, and of predicted with measured steps."""
