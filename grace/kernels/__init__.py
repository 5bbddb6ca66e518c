"""The kernels: primitive operations, one implementation per framework and device, and helpers made of them."""

from grace.kernels.dispatch import arrays_by, kernels_of
from grace.kernels.helpers import dequantize, desparsify, pack, quantize, sparsify, unpack
from grace.kernels.random import Stream
from grace.kernels.reference import Kernels, NumpyKernels

__all__ = [
    "Kernels",
    "NumpyKernels",
    "Stream",
    "arrays_by",
    "dequantize",
    "desparsify",
    "kernels_of",
    "pack",
    "quantize",
    "sparsify",
    "unpack",
]
