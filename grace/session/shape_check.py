"""Comparison of saved values with the form that this run keeps."""

from typing import Any

from grace.exchange.sparse_codec import is_floating
from grace.exchange.sparse_rows import NOTHING
from grace.kernels import kernels_of


def describe_mismatch(value: Any, wanted: Any, dtype: str | None = "float32") -> str:
    """Return the difference between a value and its wanted form (see ``Component.keeps``) as text; empty if there is
    none.

    Args:
        value: the value.
        wanted: the form; None if any value fits.
        dtype: the dtype of tensors; None for any type of floats.
    """
    if wanted is None:
        return ""
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or value.keys() != wanted.keys():
            return f"should be {' and '.join(wanted)}, and is not"
        differences = (describe_mismatch(value[key], one, dtype) for key, one in wanted.items())
        return next(filter(None, differences), "")
    if wanted is float:
        return "" if isinstance(value, (int, float)) else f"should be a number, and is a {type(value).__name__}"
    if not hasattr(value, "shape"):
        return f"should be a tensor, and is a {type(value).__name__}"
    if tuple(value.shape) != tuple(wanted):
        return f"should have the shape {list(wanted)}, and has {list(value.shape)}"
    kind = kernels_of(value).dtype(value)
    right = kind == dtype if dtype else is_floating(kind)
    return "" if right else f"should be {dtype or 'of floats'}, and is {kind}"


def describe_row_mismatch(value: Any, shape: tuple[int, ...]) -> str:
    """Return the difference between a value and distinct rows of a variable as text; empty if there is none."""
    if not isinstance(value, dict):
        return "should be rows and their values, and is not"
    rows, values = value["rows"], value["values"]
    why = describe_mismatch(values, (values.shape[0] if len(values.shape) else 0, *shape[1:]), None)
    if why or len(rows.shape) != 1 or not kernels_of(rows).dtype(rows).startswith("int"):
        return why or "should have one whole number for each row, and has not"
    numbers = kernels_of(rows).to_list(rows)
    if len(numbers) != values.shape[0] or not (numbers == [NOTHING] or all(0 <= n < shape[0] for n in numbers)):
        return f"should have row numbers below {shape[0]}, one for each of its {values.shape[0]} rows, and has not"
    return ""
