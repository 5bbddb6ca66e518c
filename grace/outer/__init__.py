"""The outer optimizers, one file each; :mod:`grace.core.registry` finds them here."""
