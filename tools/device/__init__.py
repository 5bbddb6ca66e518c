"""Parts that ``tools/on_device.py`` runs on a GPU."""
