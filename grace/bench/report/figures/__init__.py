"""The figures of a report, as SVG text: what they share, and one module for each kind of results."""
