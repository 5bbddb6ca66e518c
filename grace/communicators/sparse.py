"""Communicators of sparse gradients, which use the user's compressor and memory on rows."""

from typing import Any

from grace.communicators.allgather import Allgather
from grace.communicators.reduce_broadcast import ReduceBroadcast
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.exchange.row_codec import RowCodec
from grace.exchange.sparse_codec import by_rows


class RowReduceBroadcast(ReduceBroadcast):
    """ReduceBroadcast of sparse gradients, with the user's compressor and memory both ways.

    Raises:
        ConfigError: the parts cannot serve sparse gradients; the message has the reason and a remedy.
    """

    codec, can_defer = RowCodec, False

    def __init__(self, compressor: Compressor, memory: Memory, name: str, options: dict[str, Any]):
        super().__init__(*by_rows(compressor, memory, name), **options)
        answers: Any = self.answers
        kept: Any = self.answer_memory
        answers.shapes = self.compressor.shapes  # type: ignore[attr-defined]
        if hasattr(kept, "compressor"):
            kept.compressor = answers

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Return the parameters of :class:`ReduceBroadcast`."""
        return ReduceBroadcast.parameters()

    def _check(self) -> None:
        """Check nothing: :func:`~grace.exchange.sparse_codec.unfit` has checked the user's parts."""


class RowAllgather(Allgather):
    """All-gather of sparse gradients, with the user's compressor and memory.

    Args:
        compressor, memory: the user's parts.
        name: a variable with sparse gradients, for messages.

    Raises:
        ConfigError: the parts cannot serve sparse gradients; the message has the reason and a remedy.
    """

    codec, can_defer = RowCodec, False

    def __init__(self, compressor: Compressor, memory: Memory, name: str):
        super().__init__(*by_rows(compressor, memory, name))

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Return no parameters."""
        return {}

    def _check(self) -> None:
        """Check nothing: :func:`~grace.exchange.sparse_codec.unfit` has checked the user's parts."""


def row_communicator(communicator: Communicator, name: str) -> RowAllgather | RowReduceBroadcast:
    """Return the communicator of rows for a communicator of dense gradients: with its destination, or by all-gather.

    Args:
        communicator: the communicator of dense gradients.
        name: a variable with sparse gradients, for messages.

    Raises:
        ConfigError: its compressor or memory cannot serve rows.
    """
    if isinstance(communicator, ReduceBroadcast):
        return RowReduceBroadcast(communicator.compressor, communicator.memory, name, communicator.options())
    return RowAllgather(communicator.compressor, communicator.memory, name)
