"""The contracts of components and engines, whose docstrings are the specification, and the parts of every room."""
