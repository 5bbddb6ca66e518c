"""The strategy builders, one file each; :mod:`grace.core.registry` finds them here."""
