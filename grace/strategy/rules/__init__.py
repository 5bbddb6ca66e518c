"""Rules that a match may name, one file each; :mod:`grace.core.registry` finds them here."""
