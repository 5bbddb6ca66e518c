"""What everything is built of: the contracts of components and engines, whose docstrings are the specification."""
