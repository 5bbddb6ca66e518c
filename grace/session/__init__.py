"""A step of a whole model, in no framework's terms: what is exchanged, by whom, and what is kept of it."""
