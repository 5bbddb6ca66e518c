"""The primitives of :mod:`grace.kernels.contract.sparsification` in plain torch operations, on any device."""

from typing import Any

import torch

from grace.kernels.checks import check_count
from grace.kernels.contract.sparsification import SparseKernels
from grace.kernels.reference.sparsification import SMALLEST_FACTOR, rounded_down


class SparseTorch(SparseKernels):
    """A part of :class:`~grace.kernels.torch.primitives.TorchKernels`.

    >>> from grace.kernels.torch.primitives import TorchKernels
    >>> TorchKernels().above(torch.tensor([1.0, -5.0, 3.0, 0.0]), 2.0)
    tensor([1, 2], dtype=torch.int32)
    """

    on_device: Any
    topk: Any

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
        count, order = shown.sum(), (~shown).to(torch.uint8).sort(stable=True).indices
        shown = places < count
        values = torch.where(shown, values.index_select(0, order), 0.0)
        return values, torch.where(shown, top.index_select(0, order), x.numel()), count.to(torch.int32).reshape(1)

    def kth_magnitude(self, x, k):
        bits = x.view(torch.int32) & 0x7FFFFFFF
        return float(torch.topk(bits, k, sorted=False).values.min().view(torch.float32))

    def sample_indices(self, stream, n, k, like):
        starts = torch.arange(k + 1, device=like.device) * n // max(1, k)
        bits = self.random_bits(stream, k, like).to(torch.int64)
        return (starts[:-1] + (starts.diff() * bits >> 32)).to(torch.int32)

    def zero_at(self, out, indices):
        self.check_indices(indices, out.numel())
        if self.on_device(out):
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
        """On a device, where positions are not read, those outside of ``out`` get nothing."""
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


def _where(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().view(-1).to(torch.int32)
