"""Tests of Triton's kernels, which take a GPU; test_triton.py runs them in Triton's interpreter."""

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore = [f"test_triton_{name}.py" for name in ("bits", "buckets", "low_rank", "pieces")]
