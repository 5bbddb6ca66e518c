"""What carries the rows of sparse gradients, with the user's compressor and memory."""

from typing import Any

from grace.communicators.allgather import Allgather
from grace.communicators.reduce_broadcast import ReduceBroadcast
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.exchange.row_codec import RowCodec
from grace.exchange.sparse_codec import by_rows


class RowReduceBroadcast(ReduceBroadcast):
    """The user's compressor and memory on rows, both ways.

    Raises:
        ConfigError: they cannot serve sparse gradients; the message says why, and what can.
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
        """Those of the same for dense gradients."""
        return ReduceBroadcast.parameters()

    def _check(self) -> None:
        """Done by :func:`~grace.exchange.sparse_codec.unfit`."""


class RowAllgather(Allgather):
    """The all-gather of sparse gradients, with the user's compressor and memory.

    Args:
        compressor, memory: the user's.
        name: a variable that has such gradients, for messages.

    Raises:
        ConfigError: they cannot serve sparse gradients; the message says why, and what can.
    """

    codec, can_defer = RowCodec, False

    def __init__(self, compressor: Compressor, memory: Memory, name: str):
        super().__init__(*by_rows(compressor, memory, name))

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """None."""
        return {}

    def _check(self) -> None:
        """Done by :func:`unfit`."""


def row_communicator(communicator: Communicator, name: str) -> RowAllgather | RowReduceBroadcast:
    """What carries rows as this communicator carries dense gradients: through its destination, or else by all-gather.

    Args:
        name: a variable that has such gradients, for messages.

    Raises:
        ConfigError: its compressor and memory cannot serve rows.
    """
    if isinstance(communicator, ReduceBroadcast):
        return RowReduceBroadcast(communicator.compressor, communicator.memory, name, communicator.options())
    return RowAllgather(communicator.compressor, communicator.memory, name)
