"""Reports: one HTML file of any results."""
