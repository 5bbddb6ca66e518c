"""Emulated slow networks between processes of one machine."""

from grace.bench.link.emulation import Link

__all__ = ["Link"]
