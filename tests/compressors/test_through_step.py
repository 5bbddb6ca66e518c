"""Whatever tensor and communicator: one exchange by a communicator."""

import numpy as np
import pytest
import torch

import grace
from grace.communicators import Allgather, Allreduce, Broadcast
from tests.support.data import data
from tests.support.methods import SPECS, communicator_of
from tests.support.pairwise import pairwise

LAYOUTS = {
    "0-d": lambda: torch.tensor(0.7),
    "empty": lambda: torch.zeros(0),
    "empty matrix": lambda: torch.zeros(3, 0),
    "one": lambda: torch.tensor([-0.3]),
    "odd": lambda: torch.linspace(-1, 1, 777),
    "matrix": lambda: torch.linspace(-1, 1, 63).view(9, 7),
    "transposed": lambda: torch.linspace(-1, 1, 63).view(9, 7).t(),
    "strided": lambda: torch.linspace(-1, 1, 77)[::2],
    "expanded": lambda: torch.tensor(0.5).expand(3, 5),
    "channels last": lambda: torch.linspace(-1, 1, 120).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("spec", "dtype", "layout"),
    pairwise([*SPECS, "bf16"], [torch.float16, torch.bfloat16, torch.float32, torch.float64], LAYOUTS),
    ids=str,
)
def test_any_tensor_goes_through_step(spec, dtype, layout):
    x = LAYOUTS[layout]().to(dtype)
    kept = x.clone()
    communicator = communicator_of(spec)
    for _ in range(3):
        got = communicator.step(x, "w")
        assert got.shape == x.shape
        assert torch.isfinite(got).all()
        assert got.dtype == dtype
    assert torch.equal(x, kept)
    if spec == "none":
        assert torch.equal(got, x)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "memory"),
    pairwise(SPECS, [(), (0,), (3, 0), (1,), (9, 7)], ["float16", "float32", "float64"], [None, "residual"]),
    ids=str,
)
def test_any_numpy_array_goes_through_step(spec, shape, dtype, memory):
    x = np.asarray(data("gaussian", shape)).astype(dtype)
    communicator = communicator_of(spec, memory)
    for _ in range(3):
        got = communicator.step(x, "w")
        assert isinstance(got, np.ndarray)
        assert (got.shape, got.dtype) == (shape, dtype)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", ["transposed", "strided", "channels last"])
def test_a_strided_tensor_is_exchanged_as_its_contiguous_copy(spec, layout):
    x = LAYOUTS[layout]()
    strided, dense = communicator_of(spec), communicator_of(spec)
    for _ in range(3):
        assert torch.equal(strided.step(x, "w"), dense.step(x.contiguous(), "w"))


@pytest.mark.parametrize("communicator", [Allgather, Broadcast, Allreduce])
@pytest.mark.parametrize("spec", SPECS)
def test_every_legal_communicator_gives_the_same_result(spec, communicator):
    compressor = grace.make("compressor", spec)
    if communicator.accepts(compressor) is not None:
        with pytest.raises(grace.ConfigError, match="Legal communicators"):
            communicator(compressor)
        return
    x = torch.from_numpy(data("gaussian", (20, 30)))
    assert torch.equal(communicator(compressor).step(x, "w"), communicator_of(spec).step(x, "w"))
