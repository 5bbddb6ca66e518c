"""Availability of the compiled kernels, and their names; Numba is not imported."""

import os

LOOPS = (
    "all_finite", "mean_abs", "random_bits", "random_indices", "sample_indices", "quantize", "dequantize", "pack",
    "unpack", "pack_signs", "add_signs", "max_abs", "side_means", "clip_deviation", "round_powers", "add_powers",
    "round_float8", "add_float8", "rotate", "bucketize", "add_table", "quantile_buckets", "topk", "topk_chunks",
    "above", "kth_magnitude", "gather", "scatter_add", "zero_at", "add_at", "clip_norm", "one_side", "fixed_tags",
    "where_code",
)  # fmt: skip
"""Kernels that frameworks call compiled on their tensors' memory."""


def missing() -> str:
    """Return the reason why the compiled kernels cannot be used; empty if they can."""
    if os.environ.get("GRACE_FUSED", "1") == "0":
        return "GRACE_FUSED=0"
    try:
        import numba  # noqa: F401
    except ImportError:
        return "Numba is not installed"
    return ""
