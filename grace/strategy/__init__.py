"""Strategies: which machines a run has, and how its gradients travel between them."""
