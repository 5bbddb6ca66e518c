"""Kernels that take what came off the wire refuse what does not fit, and write nowhere else."""

import re

import numpy as np
import pytest
import torch

from grace.errors import PayloadError
from grace.kernels.torch.primitives import TorchKernels
from tests.support.data import REFERENCE, data
from tests.support.implementations import ALL

N, GUARD = 100, 50
FAR = [N, N + 7, -1, -N, 2**31 - 1, -(2**31)]


def i32(*values):
    return np.array(values, np.int64).astype(np.int32)


def refusals():
    """Kernel, arguments after ``out``, and what is said."""
    one = np.float32([1])
    for far in FAR:
        for indices in (i32(far), i32(3, 4, far), i32(far, 5)):
            said = re.escape(f"position {far} is not in [0, {N})")
            yield "scatter_add", (indices, np.ones(indices.size, np.float32), 0.5), said
            yield "zero_at", (indices,), said
            yield "add_at", (indices, one, 0.5), said
    for count in (2, 4, 0):
        yield "scatter_add", (i32(1, 2, 3), np.ones(count, np.float32), 1.0), f"{count} values, where there must be 3"
    for means in (np.float32([]), np.float32([1, 2])):
        yield "add_at", (i32(1, 2), means, 1.0), f"{means.size} means, where there must be 1"
    codes = np.zeros(N + 1, np.uint8)
    for n in (N - 1, N + 1, 0):
        yield "add_powers", (codes[:n], 1.0), f"{n} bytes of codes, where there must be {N}"
        yield "dequantize", (codes[:n], np.ones(2, np.float32), 7, 50, 1.0), f"{n} codes, where there must be {N}"
        yield "add_float8", (codes[:n], np.ones(2, np.float32), 50, 1.0), f"{n} codes, where there must be {N}"
    for buckets in (1, 3, 0):
        scales = np.ones(buckets, np.float32)
        yield "dequantize", (codes[:N], scales, 7, 50, 1.0), f"{buckets} scales, where there must be 2"
        yield "add_float8", (codes[:N], scales, 50, 1.0), f"{buckets} scales, where there must be 2"
    for nbytes in (12, 14, 0):
        yield "add_signs", (codes[:nbytes], one, 1.0), f"{nbytes} bytes of codes, where there must be 13"
        yield "add_table", (codes[:nbytes], 1, data("gaussian", 2), None, 1.0), "where there must be 13"
    signs = np.zeros(13, np.uint8)
    for count in (0, 2, 256):
        scales, said = np.ones(count, np.float32), f"{count} scales, where there must be 1"
        yield "add_signs", (signs, scales, 1.0), said
        yield "add_table", (signs, 1, data("gaussian", 2), scales, 1.0), said
    for bits in (1, 8):
        large, zeros = data("gaussian", (1 << bits) + 1), np.zeros((N * bits + 7) // 8, np.uint8)
        yield "add_table", (zeros, bits, large, None, 1.0), f"where there must be at most {1 << bits}"
    five = np.arange(N, dtype=np.uint8) % 6
    for bits in (3, 8):
        table = data("gaussian", 5)
        yield "add_table", (REFERENCE.pack(five, bits), bits, table, one, 1.0), re.escape("5 is not in [0, 5)")


@pytest.mark.parametrize("it", ALL)
def test_what_does_not_fit_is_refused(it):
    for method, args, said in refusals():
        whole = np.full(GUARD + N + GUARD, 7, np.float32)
        tensor = it.to(whole)  # the kernel gets a view from the middle
        sent = [it.to(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        if it.kernels.name.startswith("torch") and it.device != "cpu" and "position" in said:
            continue  # the device asserts it, which ends the process
        with pytest.raises(PayloadError, match=said):
            getattr(it.kernels, method)(tensor[GUARD:-GUARD], *sent)
        after = it.back(tensor)
        assert (after[:GUARD] == 7).all()
        assert (after[-GUARD:] == 7).all()


@pytest.mark.parametrize("it", ALL)
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_unpack_wants_the_bytes_that_the_codes_take(it, bits):
    for nbytes in (0, (N * bits + 7) // 8 - 1, (N * bits + 7) // 8 + 1):
        with pytest.raises(PayloadError, match=f"{nbytes} bytes of codes, where there must be"):
            it.run("unpack", np.zeros(nbytes, np.uint8), bits, N)


@pytest.mark.parametrize("it", ALL)
def test_the_ends_of_the_range_are_in_it(it):
    out = it.run("scatter_add", np.zeros(N, np.float32), i32(0, N - 1), np.float32([1, 2]), 1.0)
    assert out.nonzero()[0].tolist() == [0, N - 1]
    assert it.run("zero_at", out, i32(N - 1)).nonzero()[0].tolist() == [0]
    for n in (0, N):
        empty = np.zeros(n, np.float32)
        assert it.run("scatter_add", empty, i32(), np.float32([]), 1.0).shape == (n,)
        assert it.run("add_at", empty, i32(), np.float32([1]), 1.0).shape == (n,)


def test_codes_without_an_entry_add_nothing_where_nobody_reads_them(monkeypatch):
    kernels = TorchKernels()
    monkeypatch.setattr(kernels, "on_device", lambda x: True)
    codes = torch.tensor([0, 4, 5, 255], dtype=torch.uint8)
    out = kernels.add_table(torch.ones(4), codes, 8, data("gaussian", 5), None, 1.0)
    wanted = np.float32(1) + np.concatenate([data("gaussian", 5)[[0, 4]], [0, 0]]).astype(np.float32)
    assert out.tolist() == wanted.tolist()
