"""Grace for TensorFlow."""

from grace.errors import missing_extra

try:
    import tensorflow  # noqa: F401
except ImportError as error:
    raise missing_extra("tensorflow", "tensorflow") from error

from grace.communicator import Communicator
from grace.communicators import Allgather, Allreduce, Broadcast, ScatterReduce
from grace.compressor import Compressor, Traits
from grace.memory import Memory

__all__ = ["Allgather", "Allreduce", "Broadcast", "Communicator", "Compressor", "Memory", "ScatterReduce", "Traits"]
