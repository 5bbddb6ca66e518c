"""Starting the ranks of a benchmark, and hearing from them."""
