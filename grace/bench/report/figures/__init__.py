"""Figures of a report, as SVG: common parts, and one module for each kind of results."""
