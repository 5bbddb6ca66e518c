"""Two runs of a benchmark, row by row."""
