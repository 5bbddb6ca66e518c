"""Pipelines: a model cut into stages by itself, whose replicas exchange compressed gradients."""
