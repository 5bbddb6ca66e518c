"""What kernels look at before they use what came off the wire; anything may stand there."""

from typing import Any

from grace.errors import PayloadError


def check_range(lowest: float, highest: float, n: int, what: str = "position") -> None:
    """Raise PayloadError unless both are in [0, n).

    >>> check_range(0, 3, 3)
    Traceback (most recent call last):
    grace.errors.PayloadError: position 3 is not in [0, 3)
    """
    if not 0 <= lowest <= highest < n:
        raise PayloadError(f"{what} {int(highest if highest >= n else lowest)} is not in [0, {n})")


def check_count(what: str, count: Any, wanted: Any) -> None:
    """Raise PayloadError unless there are as many as there must be; a graph may not know how many there are.

    >>> check_count("values", 2, 3)
    Traceback (most recent call last):
    grace.errors.PayloadError: 2 values, where there must be 3
    """
    if isinstance(count, int) and isinstance(wanted, int) and count != wanted:
        raise PayloadError(f"{count} {what}, where there must be {wanted}")


def check_packed(nbytes: Any, bits: int, n: Any) -> None:
    """The bytes of n packed codes."""
    check_count("bytes of codes", nbytes, (n * bits + 7) // 8)


def check_scale(scale: Any) -> None:
    """The one factor of a tensor, of shape (1,), if there is one."""
    if scale is not None:
        check_count("scales", scale.shape[0], 1)


def check_table(table: Any, bits: int) -> None:
    """A table of at most as many entries as there are codes."""
    entries = table.shape[0]
    if isinstance(entries, int) and entries > 1 << bits:
        raise PayloadError(f"{entries} entries of a table, where there must be at most {1 << bits}")


def check_quantized(codes: Any, scales: Any, n: Any, bucket_size: Any) -> None:
    """The numbers of codes and scales of n elements."""
    check_count("codes", codes, n)
    check_count("scales", scales, (n + bucket_size - 1) // bucket_size)
