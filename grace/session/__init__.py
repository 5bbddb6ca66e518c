"""Steps of a whole model, independent of the framework: plans, buckets, agreement of ranks, and checkpoints."""
