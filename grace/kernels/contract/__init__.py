"""The contract of the kernels: which primitive operations there are, and what each computes."""
