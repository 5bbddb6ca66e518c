"""What ``tools/on_device.py`` runs on a GPU, part by part."""
