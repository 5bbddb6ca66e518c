"""One HTML file of any results."""
