"""Kernels for torch tensors in plain operations, on any device."""

import math
from typing import Any

import numpy as np
import torch

from grace.errors import ConfigError
from grace.kernels.checks import check_count, check_packed, check_quantized, check_range, check_scale
from grace.kernels.contract.primitives import LARGEST_FACTOR, Kernels, bucket_within
from grace.kernels.contract.quantization import gaussian_reach
from grace.kernels.random import FEISTEL_ROUNDS, LOW32, Stream, feistel_bits, philox_in_int64
from grace.kernels.torch.copies import to_device, to_host
from grace.kernels.torch.quantization import ValueTorch
from grace.kernels.torch.sparsification import SparseTorch

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOAT32_MAX = torch.finfo(torch.float32).max
CHUNK = 1 << 16  # Philox blocks at a time, so that its int64 temporaries stay in the cache


class TorchKernels(ValueTorch, SparseTorch, Kernels):
    """The contract in plain torch operations, on any device.

    >>> k = TorchKernels()
    >>> k.topk(torch.tensor([1.0, -5.0, 3.0, 5.0]), 2)
    tensor([1, 3], dtype=torch.int32)
    """

    name = "torch"

    def given(self, x):
        if x.is_nested or x.layout is not torch.strided:
            raise ConfigError(f"it is {'nested' if x.is_nested else f'sparse ({x.layout})'}; give a dense one")
        if x.is_meta:
            raise ConfigError("it is on the meta device, where tensors have no numbers")
        return super().given(x.detach())

    def flat(self, x):
        return x.contiguous().view(-1)

    def reshape(self, x, shape):
        return x.reshape(shape)

    def cast(self, x, dtype):
        return x.to(DTYPES[dtype])

    def on_device(self, x):
        return x.device.type != "cpu"

    def read(self, tensors):
        found: dict[int, list[float]] = {}
        for device in dict.fromkeys(x.device for x in tensors):
            own = [i for i, x in enumerate(tensors) if x.device == device]
            numbers = to_host(torch.cat([tensors[i].detach().reshape(-1).float() for i in own])).tolist()
            for i in own:
                found[i], numbers = numbers[: tensors[i].numel()], numbers[tensors[i].numel() :]
        return [found[i] for i in range(len(tensors))]

    def zeros(self, shape, dtype, like):
        return torch.zeros(shape, dtype=DTYPES[dtype], device=like.device)

    def full(self, values, dtype, like):
        if any(isinstance(value, torch.Tensor) for value in values):
            items = [v if isinstance(v, torch.Tensor) else torch.full((), v, device=like.device) for v in values]
            return torch.stack([item.float() for item in items]).to(DTYPES[dtype])
        return to_device(torch.tensor(values, dtype=DTYPES[dtype]), like.device)

    def to_list(self, x):
        return x.tolist()

    def zero(self, out):
        return out.zero_()

    def join(self, tensors, out=None):
        return torch.cat(tensors, out=out) if out is not None else torch.cat(tensors)

    def concat(self, tensors, axis):
        return torch.cat(tensors, axis)

    def split(self, x, sizes):
        return list(x.split(list(sizes))) if sizes else []

    def to_bytes(self, x):
        if not x.numel():  # an empty tensor may have strides that torch cannot view as bytes
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        return self.flat(x).view(torch.uint8)

    def from_bytes(self, raw, dtype, shape):
        # any other byte than 0 and 1 is no bool
        return (raw != 0 if dtype == "bool" else raw.view(DTYPES[dtype])).reshape(shape)

    def host_buffer(self, n):
        return np.empty(n, np.uint8)

    def adopt(self, array, dtype, shape, like):
        return torch.from_numpy(array).view(DTYPES[dtype]).reshape(shape).to(like.device)

    def take_rows(self, x, rows):
        return x.index_select(0, rows)

    def put_rows(self, out, rows, values):
        return out.index_copy_(0, rows.long(), values)

    def add_rows(self, out, rows, values, weight):
        return out.index_add_(0, rows, weighted(values, weight))

    def distinct(self, rows):
        return torch.unique(rows, sorted=True, return_inverse=True)

    def nbytes(self, x):
        return x.nbytes

    def dtype(self, x):
        return NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))

    def all_finite(self, x, most=math.inf) -> Any:
        finite = (torch.isfinite(x) if most == math.inf else x.float().abs() <= most).all()
        return bool(finite) if x.device.type == "cpu" else finite.float()

    def combine(self, a, x, b, y):
        return weighted(x.float(), a) + weighted(y.float(), b)

    def add(self, out, x, weight=1.0):
        return out.add_(weighted(x.to(out.dtype), weight))

    def divide(self, out, x, by):
        x = x.reshape(out.shape)
        if by == 1:
            return out.copy_(x)
        if x.device.type != "cpu":  # by a plain number CUDA multiplies with its reciprocal, which rounds twice
            by = torch.full((), by, dtype=torch.promote_types(x.dtype, out.dtype), device=x.device)
        if x.dtype == out.dtype:
            return torch.div(x, by, out=out)
        return out.copy_(x).div_(by) if out.element_size() > x.element_size() else out.copy_(x / by)

    def mean_abs(self, x):
        return x.abs().sum(dtype=torch.float64).div(max(1, x.numel())).float().reshape(1)

    def signs(self, x):
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    def matmul(self, a, b, transpose=False):
        if a.dim() > 2 and a.device.type == "cpu":  # in a batch, its bits would depend on how many there are
            return torch.stack([self.matmul(x, y, transpose) for x, y in zip(a, b, strict=True)])
        # torch's BLAS takes a narrow factor up to ten times faster on the left than on the right (on AMD processors)
        return (b.mT @ (a if transpose else a.mT)).mT.contiguous()

    def matmul_add(self, out, a, b, weight, keep=1.0):
        if not out.is_contiguous():
            dense = self.matmul_add(torch.empty_like(out, memory_format=torch.contiguous_format), a, b, weight, 0.0)
            return out.copy_(dense) if keep == 0 else out.mul_(keep).add_(dense)
        out.view(a.shape[0], b.shape[0]).addmm_(a, b.t(), alpha=weight, beta=keep)
        return out

    def orthonormalize(self, x):
        return torch.linalg.qr(x)[0].contiguous()

    def fill_zero_columns(self, x, other):
        return torch.where((x != 0).any(dim=0) & (x.abs() <= LARGEST_FACTOR).all(dim=0), x, other)

    def zero_columns(self, matrices):
        if any(x.device.type != "cpu" or not x.numel() for x in matrices):
            return True
        largest = torch.cat([x.abs().amax(dim=0) for x in matrices])
        return not bool(((largest > 0) & (largest <= LARGEST_FACTOR)).all())

    def random_bits(self, stream: Stream, n, like):
        key_low, key_high, step, draw = stream.words
        out = torch.empty(((n + 3) // 4, 4), dtype=torch.int64, device=like.device)
        for start in range(0, len(out), CHUNK):
            rows = out[start : start + CHUNK]
            block = torch.arange(start, start + len(rows), device=like.device)
            counter = (block & LOW32, block >> 32, torch.zeros_like(block) + step, torch.full_like(block, draw))
            for column, word in enumerate(_philox(counter, (key_low, key_high))):
                rows[:, column] = word
        return out.reshape(-1)[:n]

    def uniform(self, stream, n, like):
        return (self.random_bits(stream, n, like) >> 8).to(torch.float32) * 2.0**-24

    def random_indices(self, stream, n, k, like):
        index = _feistel(torch.arange(k, device=like.device), n, stream)
        while bool((outside := index >= n).any()):
            index[outside] = _feistel(index[outside], n, stream)
        return index.to(torch.int32)

    def quantize(self, x, levels, bucket_size, norm, stream):
        bucket_size = bucket_within(bucket_size, x.numel())
        n, buckets = x.numel(), -(-x.numel() // bucket_size)
        magnitude = torch.nn.functional.pad(x.abs(), (0, buckets * bucket_size - n)).view(buckets, bucket_size)
        if norm == "max":
            scales = magnitude.amax(dim=1)
        else:
            scales = magnitude.double().square().sum(dim=1)
            if norm == "rms":
                scales /= (n - bucket_size * torch.arange(buckets, device=x.device)).clamp_(max=bucket_size)
            scales = scales.sqrt_() if norm == "l2" else scales.sqrt_() * gaussian_reach(levels)
        scales = scales.clamp(max=FLOAT32_MAX).float()
        divisor = torch.where(scales > 0, scales, 1.0)[:, None]
        exact = (magnitude / divisor * levels).view(-1)[:n]
        below, above = math.floor(levels), math.ceil(levels)
        offset = (0.5 if below == above else 0.0) if stream is None else self.uniform(stream, n, x)
        code = torch.floor(exact + offset).clamp_(max=below).to(torch.int32)
        return torch.where(x >= 0, above + code, below - code).to(torch.uint8), scales

    def dequantize(self, out, codes, scales, levels, bucket_size, weight):
        n, buckets, bucket_size = codes.numel(), scales.numel(), bucket_within(bucket_size, codes.numel())
        check_quantized(n, buckets, out.numel(), bucket_size)
        part = torch.nn.functional.pad((codes.float() - levels) / levels, (0, buckets * bucket_size - n))
        factor = scales * weight
        return out.add_((factor[:, None] * part.view(buckets, bucket_size)).view(-1)[:n])

    def pack(self, codes, bits):
        if bits == 8:
            return codes
        # the 8 codes of a group make `bits` bytes: spread them to single bits, then gather 8 by 8
        n = codes.numel()
        padded = torch.nn.functional.pad(codes, (0, -n % 8))
        stream = (padded[:, None] >> self._places(codes)[:bits]) & 1
        out = (stream.view(-1, 8) << self._places(codes)).sum(dim=1, dtype=torch.uint8)
        return out[: (n * bits + 7) // 8]

    def unpack(self, packed, bits, n):
        check_packed(packed.numel(), bits, n)
        if bits == 8:
            return packed
        stream = ((packed[:, None] >> self._places(packed)) & 1).view(-1)[: n * bits].view(n, bits)
        return (stream << self._places(packed)[:bits]).sum(dim=1, dtype=torch.uint8)

    def _places(self, like):
        return torch.arange(8, dtype=torch.uint8, device=like.device)

    def pack_signs(self, x):
        return self.pack((x >= 0).to(torch.uint8), 1)

    def add_signs(self, out, packed, scale, weight):
        check_scale(scale)
        signs = self.unpack(packed, 1, out.numel()).to(out.dtype) * 2 - 1
        return out.add_(signs * (weight if scale is None else scale * weight))

    def topk(self, x, k):
        if k == 0:
            return torch.empty(0, dtype=torch.int32, device=x.device)
        bits = x.view(torch.int32) & 0x7FFFFFFF
        threshold = torch.topk(bits, k, sorted=False).values.min()
        above = (bits > threshold).nonzero().view(-1)
        ties = (bits == threshold).nonzero().view(-1)[: k - above.numel()]
        return torch.cat([above, ties]).sort().values.to(torch.int32)

    def bitmap(self, indices, n):
        codes = torch.zeros(n, dtype=torch.uint8, device=indices.device)
        return self.pack(codes.index_fill_(0, indices.long(), 1), 1)

    def positions(self, bitmap, n, count=None):
        return self.unpack(bitmap, 1, n).nonzero().view(-1).to(torch.int32)

    def narrow(self, indices):
        return indices.to(torch.int16)

    def widen(self, narrow):
        return narrow.to(torch.int32) & 0xFFFF

    def check_indices(self, indices, n):
        if indices.numel() and not self.on_device(indices):
            lowest, highest = indices.aminmax()
            check_range(int(lowest), int(highest), n)

    def gather(self, x, indices):
        return x.index_select(0, indices)

    def scatter_add(self, out, indices, values, weight):
        check_count("values", values.numel(), indices.numel())
        self.check_indices(indices, out.numel())
        indices, values = self.inside(out, indices, values)
        return out.index_add_(0, indices, weighted(values, weight))


def weighted(x, weight):
    """Return weight * x, rounded.

    With ``alpha=``, torch's own sums round the product and the sum at once on processors that can: other bits than
    the reference's.
    """
    return x if weight == 1 else x * weight


def _philox(counter, key):
    return philox_in_int64(counter, key, lambda product: product >> 32)


def _feistel(index, n, stream):
    left_bits, right_bits = feistel_bits(n)
    key_low, key_high, step, draw = stream.permuting().words
    left, right = index >> right_bits, index & (1 << right_bits) - 1
    for number in range(FEISTEL_ROUNDS):
        constants = (torch.zeros_like(right) + c for c in (number, step, draw))
        mixed = _philox((right, *constants), (key_low, key_high))[0] & (1 << left_bits) - 1
        left, right = right, left ^ mixed
        left_bits, right_bits = right_bits, left_bits
    return left << right_bits | right
