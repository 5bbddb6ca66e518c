"""The compression methods, one file each; :mod:`grace.registry` finds them here."""
