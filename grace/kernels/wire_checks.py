"""Checks of payloads that came off the wire, which may hold anything."""

from typing import Any

from grace.errors import PayloadError


def check_range(lowest: float, highest: float, n: int, what: str = "position") -> None:
    """Raise PayloadError unless the lowest and the highest are in [0, n).

    >>> check_range(0, 3, 3)
    Traceback (most recent call last):
    grace.errors.PayloadError: position 3 is not in [0, 3)
    """
    if not 0 <= lowest <= highest < n:
        raise PayloadError(f"{what} {int(highest if highest >= n else lowest)} is not in [0, {n})")


def check_count(what: str, count: object, wanted: object) -> None:
    """Raise PayloadError unless a count is the wanted one. A graph may not know counts: then they are tensors.

    >>> check_count("values", 2, 3)
    Traceback (most recent call last):
    grace.errors.PayloadError: 2 values, where there must be 3
    """
    if isinstance(count, int) and isinstance(wanted, int) and count != wanted:
        raise PayloadError(f"{count} {what}, where there must be {wanted}")


def check_packed(nbytes: object, bits: int, n: Any) -> None:
    """Raise PayloadError unless so many bytes hold n packed codes."""
    check_count("bytes of codes", nbytes, (n * bits + 7) // 8)


def check_scale(scale: Any) -> None:
    """Raise PayloadError unless a tensor's factor is None or of shape (1,)."""
    if scale is not None:
        check_count("scales", scale.shape[0], 1)


def check_table(table: Any, bits: int) -> None:
    """Raise PayloadError if a table has more entries than there are codes."""
    entries = table.shape[0]
    if isinstance(entries, int) and entries > 1 << bits:
        raise PayloadError(f"{entries} entries of a table, where there must be at most {1 << bits}")


def check_quantized(codes: object, scales: object, n: Any, bucket_size: int) -> None:
    """Raise PayloadError unless there are as many codes and scales as n elements have."""
    check_count("codes", codes, n)
    check_count("scales", scales, (n + bucket_size - 1) // bucket_size)
