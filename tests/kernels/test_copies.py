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


class OnGpu:
    """A tensor on a GPU, which notes what is asked of it."""

    device, shape, dtype = CUDA, (3,), torch.float32


class Pinned:
    """Pinned memory that a GPU copies to."""

    def __init__(self, shape, dtype, device, pin_memory):
        assert pin_memory
        assert device == "cpu"  # whatever torch.set_default_device says
        self.source = None

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.source = source
        return self


def test_copies_to_the_host_are_pinned_and_take_one_wait(monkeypatch):
    waits = []

    class Event:
        def record(self, stream):
            self.stream = stream

        def synchronize(self):
            waits.append(self.stream)

    monkeypatch.setattr(torch, "empty", Pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    sources, here = [OnGpu(), OnGpu()], torch.zeros(2)
    one, other, same = copies.to_host([*sources, here])
    assert [one.source, other.source] == sources
    assert same is here
    assert waits == ["stream of cuda"]


def test_constants_are_copied_once():
    from grace.kernels.constants import FLOAT8

    one, other = copies.constant(FLOAT8, torch.device("cpu")), copies.constant(FLOAT8.copy(), torch.device("cpu"))
    assert copies.constant(FLOAT8, torch.device("cpu")) is one
    assert other is not one
    assert torch.equal(other, one)
