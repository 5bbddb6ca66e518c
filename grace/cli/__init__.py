"""The grace command."""
