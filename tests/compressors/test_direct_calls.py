"""Methods that are called by hand, with tensors of any floating dtype."""

import numpy as np
import pytest
import torch

import grace
from tests.support.data import data


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_method_takes_every_float_directly(dtype):
    x = torch.tensor(data("gaussian", (20, 30))).to(getattr(torch, dtype))
    for spec in [*grace.known("compressor"), "topk | qsgd"]:
        if spec != "composed":
            method, same = grace.make("compressor", spec), grace.make("compressor", spec)
            got = method.decompress(*method.compress(x, "w"))
            wanted = same.decompress(*same.compress(x.float(), "w"))
            assert torch.equal(got, wanted.to(got.dtype)), spec
            assert got.dtype == (x.dtype if method.traits.exact else torch.float32), spec


def test_whole_numbers_are_refused_with_what_to_do():
    with pytest.raises(
        grace.ConfigError, match="topk: cannot compress 'w', which is of dtype int32: cast it to float32"
    ):
        grace.make("compressor", "topk").compress(np.int32([1, 2]), "w")
