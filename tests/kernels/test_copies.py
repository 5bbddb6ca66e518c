"""Copies to a GPU, of which there is none here: what is asked of torch."""

import gc
import weakref

import pytest
import torch

from grace.kernels.torch import copies

CUDA = torch.device("cuda")


class Numbers:
    """Numbers on a host, pageable or pinned."""

    def __init__(self, pinned=False):
        self.pinned = pinned

    def pin_memory(self):
        return Numbers(pinned=True)

    def to(self, device, non_blocking=False):
        assert (self.pinned, non_blocking) == (True, True)  # torch waits for others, and refuses to capture them
        return weakref.ref(self)


@pytest.mark.parametrize("capturing", [False, True])
def test_what_a_graph_copies_to_a_device_is_pinned_and_stays(capturing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(copies, "_CAPTURED", [])
    source = copies.to_device(Numbers(), CUDA)
    gc.collect()
    assert (source() is not None) == capturing


def test_constants_are_copied_once():
    from grace.kernels.constants import FLOAT8

    one, other = copies.constant(FLOAT8, torch.device("cpu")), copies.constant(FLOAT8.copy(), torch.device("cpu"))
    assert copies.constant(FLOAT8, torch.device("cpu")) is one
    assert other is not one
    assert torch.equal(other, one)
