"""Costs and errors of compressing, on one rank."""
