"""Tests of Triton's kernels, which take a GPU; test_triton.py runs them in Triton's interpreter."""

import os


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


if os.environ.get("TRITON_INTERPRET") != "1" and not _has_gpu():
    collect_ignore = [f"test_triton_{name}.py" for name in ("bits", "buckets", "low_rank", "pieces")]
