"""Predicted steps beside measured ones."""
