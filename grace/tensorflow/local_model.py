"""The model that a rank trains alone, as outer rounds read and change it: variables, and the optimizer's slots."""

import weakref
from typing import Any

import tensorflow as tf

from grace.core.compressor import Tensor
from grace.kernels import kernels_of
from grace.session.outer_rounds import LocalModel
from grace.session.sharding import Shard
from grace.tensorflow.sharding import cut, put
from grace.tensorflow.variables import value_of


class KerasModel(LocalModel):
    """Variables of a session, eagerly. The runner must not keep the session alive.

    Args:
        session: the :class:`~grace.tensorflow.session.Session`.
    """

    def __init__(self, session: Any):
        self.session = weakref.proxy(session)

    def read(self, shard: Shard) -> Tensor:
        with tf.init_scope():  # a state may be loaded while a graph is traced
            return self.session.from_tensors(cut(shard, tf.convert_to_tensor(self.session.variable(shard.whole.name))))

    def write(self, shard: Shard, value: Tensor) -> None:
        with tf.init_scope():
            put(shard, self.session.variable(shard.whole.name), self.session.representation.to_tensor(value))

    def clear_optimizer(self, shard: Shard) -> None:
        """Clear the optimizer's slots that are not finite, as those of a shard whose variable was not: a moment that is
        NaN would spoil the next update again."""
        for slot in self.session.optimizer_variables():
            value = value_of(slot)
            if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
                value.assign(tf.zeros_like(value))


class ModelInGraph(KerasModel):
    """Values of variables that a graph passes to a Python function, and gets back.

    Args:
        session: the session.
        whole: the values by variable name, which :meth:`write` replaces.
    """

    def __init__(self, session: Any, whole: dict[str, Tensor]):
        super().__init__(session)
        self.whole = whole

    def read(self, shard: Shard) -> Tensor:
        return shard.slice_of(self.whole[shard.whole.name])

    def write(self, shard: Shard, value: Tensor) -> None:
        before = self.whole[shard.whole.name]
        k = kernels_of(before)
        value = k.cast(value, k.dtype(before))
        if shard.axis is not None:
            front = (slice(None),) * shard.axis
            before_shard, after_shard = (*front, slice(shard.start)), (*front, slice(shard.stop, None))
            value = k.concat([before[before_shard], value, before[after_shard]], shard.axis)
        self.whole[shard.whole.name] = value
