"""Loss scaling: all ranks decide together whether a gradient overflowed."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from grace.tensorflow.optimizer_state import distributed_in
from grace.tensorflow.sharding import Mean


def patch_check_finite() -> None:
    """Patch ``LossScaleOptimizer``: all ranks decide, where the optimizer in it is distributed or has some in it.

    Keras decides before the exchange whether a step is made, on the rank's own gradients; a rank that skipped alone
    would leave the others waiting. The class is changed, because ``compile`` makes such optimizers by itself.
    """
    cls = keras.optimizers.LossScaleOptimizer
    plain = cls.check_finite
    if getattr(plain, "everywhere", False):  # patched already
        return

    def check_finite(self: keras.optimizers.LossScaleOptimizer, grads: "Sequence[tf.Tensor | None]") -> tf.Tensor:
        finite = plain(self, grads)
        inside = distributed_in(self.inner_optimizer)
        for optimizer in inside:
            optimizer._grace.loss_scaled = True
        return inside[0]._grace.all_true(finite) if inside else finite

    check_finite.everywhere = True  # type: ignore[attr-defined]
    cls.check_finite = check_finite


def all_finite(means: Sequence[Mean]) -> tf.Tensor:
    """Return True if all means that ranks have found are finite, which is the same on all ranks. Sums on a narrow wire
    overflow where no rank's own gradient does."""
    found = [mean for mean in means if mean.value is not None]
    values = [getattr(mean.value, "values", mean.value) for mean in found]
    checked = [
        tf.logical_or(tf.logical_not(mean.found), tf.reduce_all(tf.math.is_finite(value)))
        for mean, value in zip(found, values, strict=True)
    ]
    return tf.reduce_all(checked) if checked else tf.constant(True)
