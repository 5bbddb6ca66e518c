"""Communicators of sparse gradients, which use the user's compressor and memory on rows."""

from grace.communicators.allgather import Allgather
from grace.communicators.reduce_broadcast import ReduceBroadcast
from grace.core.communicator import Communicator
from grace.errors import ConfigError
from grace.exchange.sparse_codec import RowCompressor, RowMemory, unfit
from grace.memories.residual import Residual


def row_communicator(communicator: Communicator, name: str) -> Allgather | ReduceBroadcast:
    """Return the communicator of rows for a communicator of dense gradients: with its destination, or by all-gather.

    Args:
        communicator: the communicator of dense gradients.
        name: a variable with sparse gradients, for messages.

    Raises:
        ConfigError: its compressor or memory cannot serve rows; the message has the reason and a remedy.

    >>> row_communicator(ReduceBroadcast("topk", destination=0), "w").describe()
    'reduce_broadcast, topk, residual'
    """
    why = unfit(communicator.compressor, communicator.memory)
    if why:
        raise ConfigError(
            f"the gradient of {name!r} is sparse, and {why}. Pass sparse_as_dense=True to exchange "
            "it as a dense one, or choose another method"
        )
    rows, memory = RowCompressor(communicator.compressor), communicator.memory
    if isinstance(memory, Residual):
        memory = RowMemory(memory, rows)
    if not isinstance(communicator, ReduceBroadcast):
        return Allgather(rows, memory)
    found = ReduceBroadcast(rows, memory, **communicator.options())
    if isinstance(found.answer_memory, RowMemory):
        assert isinstance(found.answer_compressor, RowCompressor)
        found.answer_memory.compressor = (
            found.answer_compressor
        )  # each is a copy, and the memory's has no rows of answers
    return found
