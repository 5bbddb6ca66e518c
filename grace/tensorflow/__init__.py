"""Grace for TensorFlow and Keras 3."""

from grace.errors import missing_extra

try:
    import tensorflow  # noqa: F401
except ImportError as error:
    raise missing_extra("tensorflow", "tensorflow") from error

from grace import communicators
from grace.communicators import *  # noqa: F403 (a new one needs no line here)
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor, Traits
from grace.core.memory import Memory
from grace.tensorflow.callbacks import AnchorCallback, BroadcastCallback, MetricAverageCallback, TrafficCallback
from grace.tensorflow.collectives import allgather, allreduce, broadcast
from grace.tensorflow.lr_warmup import LearningRateWarmupCallback
from grace.tensorflow.optimizer import DistributedOptimizer
from grace.tensorflow.saving import load_model, save_model
from grace.tensorflow.tape import DistributedGradientTape, GradientExchange
from grace.tensorflow.variables import broadcast_variables

__all__ = [
    "AnchorCallback",
    "BroadcastCallback",
    "Communicator",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GradientExchange",
    "LearningRateWarmupCallback",
    "Memory",
    "MetricAverageCallback",
    "TrafficCallback",
    "Traits",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "load_model",
    "save_model",
]
__all__ += communicators.__all__
