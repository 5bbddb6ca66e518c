"""The value quantizers' kernels in plain torch operations."""

from typing import Any

import torch

from grace.kernels.checks import check_packed, check_quantized, check_scale, check_table
from grace.kernels.contract.primitives import bucket_within
from grace.kernels.contract.quantization import LARGEST_FLOAT8, LOWEST_BIASED, POWER_OFFSET, ROTATED
from grace.kernels.reference.quantization import CONSTANT, FLOAT8, ROOT
from grace.kernels.torch.copies import constant

FLOAT32_MAX = torch.finfo(torch.float32).max


class ValueTorch:
    """A part of :class:`~grace.kernels.torch.primitives.TorchKernels`. Nothing is read back from the device."""

    random_bits: Any
    uniform: Any
    unpack: Any
    check_indices: Any

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
        limit = torch.where(deviation > CONSTANT * mean.abs(), factor * deviation, FLOAT32_MAX)
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
