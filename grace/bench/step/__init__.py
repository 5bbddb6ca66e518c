"""Step times, side by side over the same network."""
