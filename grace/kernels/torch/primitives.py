"""Kernels for torch tensors in plain operations, on any device."""

import math

import torch

from grace.errors import ConfigError
from grace.kernels.constants import (
    EQUAL_DEVIATION,
    FLOAT8,
    LARGEST_FACTOR,
    LARGEST_FLOAT8,
    LOWEST_BIASED,
    POWER_OFFSET,
    ROOT,
    ROTATED,
    SMALLEST_FACTOR,
    bucket_within,
    gaussian_reach,
    rounded_down,
)
from grace.kernels.random import FEISTEL_ROUNDS, MULTIPLIERS, ROUNDS, WEYL, Stream, feistel_bits
from grace.kernels.reference import Kernels
from grace.kernels.torch.copies import constant, to_device, to_host
from grace.kernels.wire_checks import check_count, check_packed, check_quantized, check_range, check_scale, check_table

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOAT32_MAX = torch.finfo(torch.float32).max
LOW32 = 0xFFFFFFFF
CHUNK = 1 << 16  # Philox blocks at a time, so that its int64 temporaries stay in the cache


class TorchKernels(Kernels):
    """Kernels in plain torch operations, on any device. Numbers are read back only by ``to_list``, ``read``, and
    methods whose results have a size that depends on the data.

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
        if hasattr(x, "device_mesh"):
            raise ConfigError("it is a DTensor, of which this rank has a part: give its to_local() or full_tensor()")
        # Memory must hold the numbers themselves: torch may negate them only where they are read, as in x.conj().imag.
        return super().given(x.detach().resolve_neg())

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
        # One copy for each device, and so one wait.
        for device in dict.fromkeys(x.device for x in tensors):
            own = [i for i, x in enumerate(tensors) if x.device == device]
            numbers = to_host([torch.cat([tensors[i].detach().reshape(-1).float() for i in own])])[0].tolist()
            for i in own:
                found[i], numbers = numbers[: tensors[i].numel()], numbers[tensors[i].numel() :]
        return [found[i] for i in range(len(tensors))]

    def to_host(self, tensors):
        return to_host(tensors)

    def to_device_of(self, x, like):
        if x.device == like.device:
            return x
        return to_device(x, like.device) if x.device.type == "cpu" else x.to(like.device)

    def zeros(self, shape, dtype, like):
        return torch.zeros(shape, dtype=DTYPES[dtype], device=like.device)

    def full(self, values, dtype, like):
        if any(isinstance(value, torch.Tensor) for value in values):
            items = [v if isinstance(v, torch.Tensor) else torch.full((), v, device=like.device) for v in values]
            return torch.stack([item.float() for item in items]).to(DTYPES[dtype])
        return to_device(torch.tensor(values, dtype=DTYPES[dtype], device="cpu"), like.device)

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

    def all_finite(self, x, most=math.inf):
        # One pass over memory; isfinite() and all() take five on a GPU. The norm is NaN if an element is.
        x = x if x.is_floating_point() else x.float()
        largest = torch.linalg.vector_norm(x if x.numel() else x.new_zeros(1), math.inf).double()
        finite = largest < math.inf if most == math.inf else largest <= most
        return finite.float() if self.on_device(x) else bool(finite)

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
        if not out.is_contiguous():  # such as a channels_last gradient, which has no view as a matrix
            dense = self.matmul_add(torch.empty_like(out, memory_format=torch.contiguous_format), a, b, weight, 0.0)
            return out.copy_(dense) if keep == 0 else out.mul_(keep).add_(dense)
        out.view(a.shape[0], b.shape[0]).addmm_(a, b.t(), alpha=weight, beta=keep)
        return out

    def orthogonalize(self, x):
        return torch.linalg.qr(x)[0].contiguous()

    def fill_zero_columns(self, x, other):
        return torch.where((x != 0).any(dim=0) & (x.abs() <= LARGEST_FACTOR).all(dim=0), x, other)

    def zero_columns(self, matrices):
        if any(x.device.type != "cpu" or not x.numel() for x in matrices):
            return True
        largest = torch.cat([x.abs().amax(dim=0) for x in matrices])
        return not bool(((largest > 0) & (largest <= LARGEST_FACTOR)).all())

    def random_bits(self, stream: Stream, n, like=None):
        key_low, key_high, step, draw = stream.words
        out = torch.empty(((n + 3) // 4, 4), dtype=torch.int64, device=like.device)
        for start in range(0, len(out), CHUNK):
            rows = out[start : start + CHUNK]
            block = torch.arange(start, start + len(rows), device=like.device)
            # The step may be a tensor, which full_like() does not take.
            counter = (block & LOW32, block >> 32, torch.zeros_like(block) + step, torch.full_like(block, draw))
            for column, word in enumerate(_philox(counter, (key_low, key_high))):
                rows[:, column] = word
        return out.reshape(-1)[:n]

    def uniform(self, stream, n, like=None):
        return (self.random_bits(stream, n, like) >> 8).to(torch.float32) * 2.0**-24

    def random_indices(self, stream, n, k, like=None):
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
        # At most 1 before it is scaled, so that nothing overflows that need not.
        part = torch.nn.functional.pad((codes.float() - levels) / levels, (0, buckets * bucket_size - n))
        factor = scales * weight
        return out.add_((factor[:, None] * part.view(buckets, bucket_size)).view(-1)[:n])

    def pack(self, codes, bits):
        if bits == 8:
            return codes
        # the 8 codes of a group make `bits` bytes: spread them to single bits, then gather 8 by 8
        n = codes.numel()
        padded = torch.nn.functional.pad(codes, (0, -n % 8))
        stream = (padded[:, None] >> self._bit_positions(codes)[:bits]) & 1
        out = (stream.view(-1, 8) << self._bit_positions(codes)).sum(dim=1, dtype=torch.uint8)
        return out[: (n * bits + 7) // 8]

    def unpack(self, packed, bits, n):
        check_packed(packed.numel(), bits, n)
        if bits == 8:
            return packed
        stream = ((packed[:, None] >> self._bit_positions(packed)) & 1).view(-1)[: n * bits].view(n, bits)
        return (stream << self._bit_positions(packed)[:bits]).sum(dim=1, dtype=torch.uint8)

    def _bit_positions(self, like):
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
        # torch.topk leaves open which of equal elements it takes: take those with the lowest indices.
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

    def max_abs(self, x):
        if not x.numel():
            return x.new_zeros(1)
        return x.abs().amax().clamp(max=FLOAT32_MAX).reshape(1)

    def side_means(self, x):
        upper = x >= 0
        sides = torch.stack([~upper, upper])
        return ((x.double() * sides).sum(dim=1) / sides.sum(dim=1).clamp(min=1)).float()

    def clip_deviation(self, x, factor):
        if not x.numel():
            return x.clone()
        wide = x.double()
        mean = wide.mean()
        deviation = (wide - mean).square_().mean().sqrt()
        limit = torch.where(deviation > EQUAL_DEVIATION * mean.abs(), factor * deviation, FLOAT32_MAX)
        limit = limit.clamp(max=FLOAT32_MAX).float()
        return torch.clamp(x, -limit, limit)

    def round_powers(self, x, stream):
        bits = x.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        random = self.random_bits(stream, x.numel(), x).to(torch.int64) & 0xFFFFFFFF
        exponent = (magnitude.to(torch.int64) + (random >> 9) >> 23) - POWER_OFFSET
        code = exponent.clamp_(1, 127) + torch.where(bits < 0, 128, 0)
        return torch.where(magnitude > 0, code, 0).to(torch.uint8)

    def add_powers(self, out, codes, weight):
        check_packed(codes.numel(), 8, out.numel())
        power = codes.to(torch.int32) & 0x7F
        values = torch.where(power > 0, power + POWER_OFFSET << 23, 0).view(torch.float32)
        values = torch.where(codes >= 128, -values, values)
        return out.add_(values.mul_(weight))

    def round_float8(self, x, bucket_size, stream):
        n, bucket_size = x.numel(), bucket_within(bucket_size, x.numel())
        magnitude = torch.nn.functional.pad(x.abs(), (0, -n % bucket_size)).view(-1, bucket_size)
        scales = magnitude.amax(dim=1).clamp(max=FLOAT32_MAX)
        divisor = torch.where(scales > 0, scales, 1.0)[:, None]
        scaled = (magnitude / divisor * LARGEST_FLOAT8).view(-1)[:n]
        biased = (scaled.view(torch.int32) >> 23).clamp_(min=LOWEST_BIASED)
        places = scaled * (257 - biased << 23).view(torch.float32)
        places += 0.5 if stream is None else self.uniform(stream, n, x)
        code = ((biased - LOWEST_BIASED) * 8 + places.to(torch.int32)).clamp_(max=126)
        return (code + torch.where(x < 0, 128, 0)).to(torch.uint8), scales

    def add_float8(self, out, codes, scales, bucket_size, weight):
        n, bucket_size = codes.numel(), bucket_within(bucket_size, codes.numel())
        check_quantized(n, scales.numel(), out.numel(), bucket_size)
        values = constant(FLOAT8, out.device).index_select(0, codes.to(torch.int32))
        return out.add_((scales * weight).repeat_interleave(bucket_size)[:n] * values)

    def rotate(self, x):
        whole = x.numel() // ROTATED * ROTATED
        # Scaled first, so that no sum overflows.
        rows, span = x[:whole] * (1 / ROTATED), 1
        while span < ROTATED:
            left, right = rows.view(-1, 2, span).unbind(1)
            rows = torch.stack([left + right, left - right], dim=1)
            span *= 2
        rows = (rows.view(-1) * float(ROOT)).clamp_(-FLOAT32_MAX, FLOAT32_MAX)
        return torch.cat([rows, x[whole:]])

    def bucketize(self, x, scale, edges):
        divisor = torch.where(scale > 0, scale, 1.0)
        return torch.bucketize(x / divisor, constant(edges, x.device), out_int32=True).to(torch.uint8)

    def add_table(self, out, packed, bits, table, scale, weight):
        check_scale(scale)
        check_table(table, bits)
        codes = self.unpack(packed, bits, out.numel()).to(torch.int32)
        if len(table) < 1 << bits:
            self.check_indices(codes, len(table))
        factor = weight if scale is None else scale * weight
        amounts = constant(table, out.device) * factor
        # on a device nobody looks whether each code has an entry: those without one add nothing
        amounts = torch.nn.functional.pad(amounts, (0, (1 << bits) - len(table)))
        return out.add_(amounts.index_select(0, codes))

    def quantile_buckets(self, x, buckets):
        # 1. one stable sort; adding 0 makes -0 the 0 that it equals, for sorts that go by bits
        n = x.numel()
        ordered, order = torch.sort(x + 0.0, stable=True)
        ranks = torch.arange(n, device=x.device)
        codes = torch.empty(n, dtype=torch.uint8, device=x.device)
        codes[order] = (ranks * buckets // max(1, n)).to(torch.uint8)
        if not n:
            return codes, x.new_zeros(buckets)
        # 2. a row of the sorted elements per bucket, one longer than the shorter buckets are
        edges = -(-torch.arange(buckets + 1, device=x.device) * n // buckets)
        sizes = edges.diff()[:, None]
        places = torch.arange(n // buckets + 1, device=x.device)
        rows = ordered[(edges[:-1, None] + places).clamp_(max=n - 1)].double() * (places < sizes)
        return codes, (rows.sum(dim=1, keepdim=True) / sizes).float().view(-1)

    def topk_chunks(self, x, chunk, k):
        rows, count = -(-x.numel() // chunk), -(-k * x.numel() // chunk)
        bits = torch.nn.functional.pad(x.view(torch.int32) & 0x7FFFFFFF, (0, rows * chunk - x.numel()), value=-1)
        place = torch.arange(chunk, device=x.device)
        keys = bits.view(rows, chunk).long() * chunk - place  # all distinct: torch leaves the order of equals open
        order = torch.topk(keys, k, dim=1).indices
        order[-1:, count - (rows - 1) * k :] = chunk  # behind those that the last chunk has
        found = order.sort(dim=1).values + chunk * torch.arange(rows, device=x.device)[:, None]
        return found.view(-1)[:count].to(torch.int32)

    def widen_chunks(self, narrow, chunk, k):
        starts = torch.arange(narrow.numel(), dtype=torch.int32, device=narrow.device) // max(1, k) * chunk
        return (starts & ~0xFFFF) | self.widen(narrow)

    def above(self, x, threshold):
        return _where(x.abs() > threshold)

    def largest_above(self, x, threshold, room, ratio=1.0):
        top, places = self.topk(x, room), torch.arange(room, device=x.device)
        values = x.index_select(0, top)
        shown = values.abs() > threshold
        if ratio != 1:
            order = (values.view(torch.int32) & 0x7FFFFFFF).sort(descending=True, stable=True).indices
            most = ((x.abs() > threshold).sum().double() * ratio).round().clamp(min=1)
            shown = shown & (torch.empty_like(order).scatter_(0, order, places) < most)
        # A stable sort by one flag moves the shown ones to the front, in their order; nothing is read back.
        count, order = shown.sum(), (~shown).to(torch.uint8).sort(stable=True).indices
        shown = places < count
        values = torch.where(shown, values.index_select(0, order), 0.0)
        return values, torch.where(shown, top.index_select(0, order), x.numel()), count.to(torch.int32).reshape(1)

    def kth_magnitude(self, x, k):
        bits = x.view(torch.int32) & 0x7FFFFFFF
        return float(torch.topk(bits, k, sorted=False).values.min().view(torch.float32))

    def sample_indices(self, stream, n, k, like=None):
        starts = torch.arange(k + 1, device=like.device) * n // max(1, k)
        bits = self.random_bits(stream, k, like).to(torch.int64)
        return (starts[:-1] + (starts.diff() * bits >> 32)).to(torch.int32)

    def zero_at(self, out, indices):
        self.check_indices(indices, out.numel())
        if self.on_device(out):
            # Positions are not read here: those outside mark one more element, which is cut off.
            marked = torch.zeros(out.numel() + 1, dtype=torch.bool, device=out.device)
            there = torch.where((indices >= 0) & (indices < out.numel()), indices, out.numel())
            return out.masked_fill_(marked.index_fill_(0, there.long(), True)[:-1], 0)
        return out.index_fill_(0, indices.long(), 0)

    def add_at(self, out, indices, value, weight):
        check_count("means", value.numel(), 1)
        self.check_indices(indices, out.numel())
        indices, values = self.inside(out, indices, (value * weight).expand(indices.numel()))
        return out.index_add_(0, indices, values)

    def inside(self, out, indices, values):
        """Return indices and values. On a device, where positions are not read, ones outside ``out`` become zeros."""
        if not self.on_device(out):
            return indices, values
        inside = (indices >= 0) & (indices < out.numel())
        return torch.where(inside, indices, 0), torch.where(inside, values, 0.0)

    def clip_norm(self, x, limit):
        norm = x.double().square().sum().sqrt()
        factor = torch.where(norm > limit, limit / norm, 1.0)
        factor = torch.where(factor >= SMALLEST_FACTOR, factor.float().double(), factor)
        return (x.double() * factor).float()

    def one_side(self, x, sign):
        positive = x > 0 if sign > 0 else x < 0
        count = positive.sum()
        return torch.where(positive, x.abs(), 0.0), count if self.on_device(x) else int(count)

    def fixed_tags(self, x, bound, top, step8, step16):
        magnitude = x.abs()
        inside = magnitude <= top
        capped = torch.where(inside, magnitude, 0.0)
        tags = torch.full_like(x, 3, dtype=torch.uint8)
        tags[inside & (torch.round(capped * (1 / step16)) <= 32767)] = 2
        tags[inside & (torch.round(capped * (1 / step8)) <= 127)] = 1
        tags[magnitude <= float(rounded_down(bound))] = 0
        return tags

    def where_code(self, codes, code):
        return _where(codes == code)

    def to_fixed(self, x, step, dtype):
        return torch.round(x * (1 / step)).to(getattr(torch, dtype))


def weighted(x, weight):
    """Return weight * x, rounded.

    With ``alpha=``, torch's own sums round the product and the sum at once on processors that can: other bits than
    the reference's.
    """
    return x if weight == 1 else x * weight


def _philox(counter, key):
    """Return the four output words of each block: int64s that hold 32 bits, in and out."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        # int64 products wrap, but their bits are those of the unsigned ones
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & LOW32) ^ c1 ^ k0, p1 & LOW32, (p0 >> 32 & LOW32) ^ c3 ^ k1, p0 & LOW32
        k0, k1 = k0 + WEYL[0] & LOW32, k1 + WEYL[1] & LOW32
    return c0, c1, c2, c3


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


def _where(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().view(-1).to(torch.int32)
