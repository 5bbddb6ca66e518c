"""The memories, one file each; :mod:`grace.registry` finds them here."""
