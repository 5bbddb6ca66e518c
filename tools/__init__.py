"""Programs for this checkout, which are not installed."""
