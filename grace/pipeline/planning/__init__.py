"""A model's graph cut into the stages of a pipeline, in no framework's terms."""
