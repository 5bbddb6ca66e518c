"""Tests of Triton's kernels, which take a GPU; test_triton.py runs them in Triton's interpreter."""

from tests.support.implementations import OTHERS

if not any(param.id == "triton" for param in OTHERS):
    collect_ignore = [f"test_triton_{name}.py" for name in ("bits", "buckets", "low_rank", "pieces")]
