"""Starting ranks on machines."""
