"""Layouts: every payload of a bucket in one buffer, with a status per variable."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grace
from grace.exchange.header import MISSING, OVERFLOW, PRESENT, status
from grace.exchange.layout import Layout
from grace.kernels.constants import ITEM_SIZE
from tests.support.data import same
from tests.support.implementations import ALL

DTYPES = ["float64", "float32", "float16", "int32", "uint8"]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 100, shape).astype(dtype),
    st.sampled_from(DTYPES),
    SHAPES,
    st.integers(0, 1000),
)
PAYLOADS = st.lists(st.lists(TENSORS, min_size=1, max_size=4), min_size=1, max_size=4)
every = pytest.mark.parametrize("it", ALL)


def check_round_trip(it, payloads, sums):
    wire = Layout.from_payloads(it.kernels, [[it.to(x) for x in payload] for payload in payloads], sums)
    statuses = [PRESENT, MISSING, OVERFLOW, PRESENT][: len(payloads)]
    tensors = [[it.to(x) for x in payload] for payload in payloads]
    buffer = wire.pack(tensors, statuses)
    assert tuple(buffer.shape) == (wire.length,)
    assert it.kernels.to_list(buffer[wire.statuses]) == statuses
    for payload, unpacked in zip(payloads, wire.unpack(buffer), strict=True):
        for x, y in zip(payload, unpacked, strict=True):
            same(x, it.back(y))
    assert wire.payload_bytes == [sum(x.nbytes for x in payload) for payload in payloads]
    return wire, buffer


@every
@given(payloads=PAYLOADS)
def test_byte_wires_carry_any_mix_of_tensors(it, payloads):
    wire, buffer = check_round_trip(it, payloads, sums=False)
    assert wire.length % 8 == 0
    assert wire.length - sum(wire.payload_bytes) < len(payloads) + 8
    raw = it.back(buffer)
    assert not raw[wire.body + len(payloads) :].any()  # padding is zero, not leftover memory


@every
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@given(shapes=st.lists(st.lists(SHAPES, min_size=1, max_size=2), min_size=1, max_size=4))
def test_summed_wires_carry_one_dtype(it, dtype, shapes):
    payloads = [[np.full(shape, 3, dtype) for shape in payload] for payload in shapes]
    wire, buffer = check_round_trip(it, payloads, sums=True)
    assert it.kernels.dtype(buffer) == wire.dtype == dtype
    assert wire.length == sum(x.size for payload in payloads for x in payload) + len(payloads)


@given(payloads=PAYLOADS)
def test_every_tensor_of_a_byte_wire_is_aligned(payloads):
    it = ALL[2].values[0]
    tensors = [[it.to(x) for x in payload] for payload in payloads]
    wire = Layout.from_payloads(it.kernels, tensors, sums=False)
    buffer = wire.pack(tensors, [PRESENT] * len(payloads))
    for payload in wire.unpack(buffer):
        for tensor in payload:
            offset = tensor.data_ptr() - buffer.data_ptr()
            assert tensor.numel() == 0 or offset % ITEM_SIZE[it.kernels.dtype(tensor)] == 0


def test_unpacked_tensors_are_views_of_the_buffer():
    payload = [torch.tensor([1.0, 2.0]), torch.tensor([7], dtype=torch.uint8)]
    wire = Layout.from_payloads(grace.kernels_of(payload[0]), [payload], sums=False)
    buffer = wire.pack([payload], [PRESENT])
    buffer.zero_()
    assert [tensor.tolist() for tensor in wire.unpack(buffer)[0]] == [[0, 0], [0]]


def test_pack_reuses_the_buffer_and_follows_the_statuses():
    payloads = [[torch.tensor([1.0])], [torch.tensor([2.0, 3.0])]]
    wire = Layout.from_payloads(grace.kernels_of(payloads[0][0]), payloads, sums=True)
    buffer = wire.pack(payloads, [1, 1])
    again = wire.pack(payloads, [1, math.inf], out=buffer)
    assert again.data_ptr() == buffer.data_ptr()
    assert again.tolist() == [1, 2, 3, 1, math.inf]
    assert wire.pack(payloads, [0, 1], out=buffer).tolist() == [1, 2, 3, 0, 1]


def test_summed_statuses_tell_missing_present_and_overflow_apart():
    payloads = [[torch.zeros(2)], [torch.zeros(1)], [torch.zeros(1)]]
    wire = Layout.from_payloads(grace.kernels_of(payloads[0][0]), payloads, sums=True)
    ranks = [[status(True, True, True), status(False, True, True), status(True, True, True)]]
    ranks += [[status(True, True, True), status(False, True, True), status(True, False, True)]]
    total = sum(wire.pack(payloads, statuses).clone() for statuses in ranks)
    assert total[wire.statuses].tolist() == [2, 0, math.inf]


@pytest.mark.parametrize("sums", [False, True])
def test_a_status_may_come_from_a_tensor_that_is_not_read(sums):
    for finite, expected in ((1.0, PRESENT), (0.0, math.inf if sums else OVERFLOW)):
        assert float(status(True, torch.tensor(finite), sums)) == expected
        assert status(True, bool(finite), sums) == expected
        assert status(False, torch.tensor(finite), sums) == MISSING


@pytest.mark.parametrize(
    "payload", [[np.zeros(2, np.uint8)], [np.zeros(2, np.float32), np.zeros(2, np.float16)]], ids=["whole", "mixed"]
)
def test_payloads_that_cannot_be_summed_are_refused_by_dtype(payload):
    with pytest.raises(grace.ConfigError, match="one floating dtype, not"):
        Layout.from_payloads(grace.kernels_of(payload[0]), [payload], sums=True)


def test_a_dtype_that_the_wire_does_not_carry_is_named():
    with pytest.raises(grace.ConfigError, match="complex64; the wire carries"):
        Layout.from_payloads(grace.kernels_of(torch.zeros(1)), [[torch.zeros(1, dtype=torch.complex64)]], sums=False)


@every
def test_another_ranks_layout_keeps_tensors_of_no_dimensions_and_has_its_own_dtypes(it):
    wire = Layout.from_payloads(it.kernels, [[it.to(x) for x in (np.float32(3), np.int16([1, 2]))]], sums=False)
    theirs = [it.to(x) for x in (np.float32(5), np.int64([7, 8, 9]))]
    other = Layout.from_payloads(it.kernels, [theirs], sums=False)
    unpacked = wire.resized(other.sizes()).unpack(other.pack([theirs], [PRESENT]))[0]
    for mine, received in zip(theirs, unpacked, strict=True):
        same(it.back(received), it.back(mine))


@pytest.mark.parametrize("size", [-1, 1 << 60, 2])
def test_a_size_that_no_tensor_of_the_payload_can_have_is_refused(size):
    wire = Layout.from_payloads(grace.kernels_of(np.zeros(1)), [[np.float32(3)]], sums=False)
    with pytest.raises(grace.errors.PayloadError, match="a header announces a payload tensor of"):
        wire.resized([size])
