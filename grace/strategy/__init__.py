"""The strategy layer: how each variable's gradient is partitioned, synchronized and compressed."""
