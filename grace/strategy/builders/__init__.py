"""The strategy builders, one file each; :mod:`grace.registry` finds them here."""
