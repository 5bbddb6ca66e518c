"""Loss scaling: all ranks decide together whether a gradient overflowed."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from grace.tensorflow.optimizer_state import distributed_in


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
        return inside[0]._grace.all_true(finite) if inside else finite

    check_finite.everywhere = True  # type: ignore[attr-defined]
    cls.check_finite = check_finite
