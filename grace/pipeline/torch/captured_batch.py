"""A model captured for a batch, as planning, the dry run and the stages need it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.pipeline.torch.atomic_subcomponents import Atoms
from grace.pipeline.torch.capture import capture
from grace.pipeline.torch.micro_batches import count_rows


class CapturedBatch:
    """A model captured for a batch.

    Args:
        model: the model, in training mode or not.
        args, kwargs: arguments of a call with the batch.
        whole: names of inputs that have no rows, whatever their shapes are.

    Attributes:
        captured: the model's graph.
        atoms: its atomic subcomponents.
        flat: the flat inputs.
        whole: for each flat input, True if it has no rows.
        rows: rows of the batch.

    Raises:
        ConfigError: the model cannot be captured, ``whole`` names no input, or the batch has no rows.
    """

    def __init__(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], whole: Collection[str] = ()
    ):
        self.model = model
        self.captured = capture(model, args, kwargs)
        self.atoms = Atoms(self.captured)
        unknown = [name for name in whole if name not in self.captured.inputs]
        if unknown:
            raise ConfigError(
                f"whole= names {unknown[0]!r}, which is no input of the model: {', '.join(self.captured.inputs)}"
            )
        self.whole_names = whole
        self.whole = [name in whole for name in self.captured.inputs]
        self.flat = self.captured.flat(args, kwargs)
        self.rows = count_rows(self.flat, self.whole)

    def with_inputs(self, flat: Sequence[Any]) -> "CapturedBatch":
        """Return the model captured for other flat inputs."""
        args, kwargs = pytree.tree_unflatten(list(flat), self.captured.in_spec)
        return CapturedBatch(self.model, args, kwargs, self.whole_names)
