"""Gradients of custom loops: a GradientTape whose gradients are those of all ranks."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grace.backends.horovod import Compression, compressor_for
from grace.core.arguments import accept_grace_argument
from grace.core.backend import Backend
from grace.core.communicator import Communicator, CommunicatorArg, CompressorArg, MemoryArg
from grace.errors import ConfigError, ExchangeError
from grace.session.settings import ReduceOp, Settings
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyArg
from grace.strategy.resources import ResourcesArg
from grace.tensorflow.distribute import check_not_distribute
from grace.tensorflow.optimizer_checks import check_arguments, check_tape
from grace.tensorflow.optimizer_state import GraceState
from grace.tensorflow.reductions import engine_of
from grace.tensorflow.sharding import Mean
from grace.tensorflow.step_session import StepSession, TapeGradient
from grace.tensorflow.variables import AnyVariable, is_overwritten, value_of

if TYPE_CHECKING:  # Horovod need not be installed
    from horovod.common.process_sets import ProcessSet


class GradientExchange(StepSession):
    """Exchange that the tapes of a loop share, with its state from step to step.

    Make it once, before the loop. ``tf.train.Checkpoint(model=model, exchange=exchange.grace_state)`` saves and
    restores what this rank remembers.

    Args:
        compressor, memory, communicator, strategy, resources: as for :func:`~grace.tensorflow.DistributedOptimizer`.
        op, gradient_predivide_factor, sparse_as_dense, hierarchical, compress_after, compression: as for
            :func:`~grace.tensorflow.DistributedOptimizer`.
        process_set, backend, broadcast, seed, bucket_bytes, group_bytes: as for
            :func:`~grace.tensorflow.DistributedOptimizer`.
        others: refused. The errors for the optimizer's and Horovod's other arguments say what to write instead.

    Raises:
        ConfigError: what was given cannot work; nothing was exchanged.

    >>> import grace
    >>> engine = grace.init("local")
    >>> exchange, w = GradientExchange("topk(ratio=0.5)"), tf.Variable([1.0, 2.0])
    >>> with DistributedGradientTape(tf.GradientTape(), exchange=exchange) as tape:
    ...     loss = tf.reduce_sum(w * w)
    >>> tape.gradient(loss, [w])[0].numpy()
    array([0., 4.], dtype=float32)
    >>> grace.shutdown()
    """

    def __init__(
        self,
        compressor: CompressorArg | None = None,
        memory: MemoryArg | None = None,
        communicator: CommunicatorArg | None = None,
        *,
        strategy: StrategyArg | None = None,
        resources: ResourcesArg | None = None,
        op: str | int = "average",
        gradient_predivide_factor: float = 1.0,
        process_set: "ProcessSet | None" = None,
        backend: Backend | None = None,
        sparse_as_dense: bool = False,
        broadcast: bool = True,
        hierarchical: bool = False,
        compress_after: int = 0,
        seed: int = 0,
        bucket_bytes: int | None = None,
        group_bytes: int | None = None,
        compression: Compression | None = None,
        **others: Any,
    ):
        check_arguments(others, type(self).__name__)
        super().__init__(
            Choices(compressor_for(None, compression, compressor), memory, communicator, strategy, resources),
            engine_of(process_set, backend),
            Settings(
                reduction=ReduceOp(op, gradient_predivide_factor),
                bucket_bytes=bucket_bytes,
                group_bytes=group_bytes,
                seed=seed,
                sparse_as_dense=sparse_as_dense,
                broadcast=broadcast,
                hierarchical=hierarchical,
                compress_after=compress_after,
            ),
            check=_check,
        )
        self.grace_state = GraceState(self)

    def mean_or_none(self, i: int, mean: Mean) -> "tf.Tensor | tf.IndexedSlices | None":
        """Return, in a graph, the mean for a variable that has no gradient on this rank; None if no rank had one when
        the exchange began. The graph then raises ExchangeError if a rank has one later."""
        if not self.missing_everywhere[i]:
            return mean.value

        def check(found: tf.Tensor) -> None:
            if found:
                raise ExchangeError(
                    f"the gradient of {self.names[i]!r} is None in this graph, because no rank had one when the "
                    "exchange began, and now another rank has one. Let all ranks have one, if need be of zeros: "
                    "tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO)"
                )

        with tf.control_dependencies(tf.nest.flatten(mean.value, expand_composites=True)):  # once the step is made
            tf.py_function(check, [mean.found], [])
        return None


ARGUMENTS = inspect.signature(GradientExchange).parameters.keys()
"""Names of the arguments of a GradientExchange, which tapes take too."""


def _check(communicator: Communicator) -> None:
    memory = communicator.memory
    if memory.needs_lr:
        raise ConfigError(
            f"the memory {memory.spec} follows the learning rate, which a tape does not know: use "
            "grace.DistributedOptimizer"
        )


def gradient_free(gradient: TapeGradient) -> TapeGradient:
    """Return a gradient that an outer tape does not differentiate."""
    if gradient is None:
        return None
    return tf.nest.map_structure(tf.stop_gradient, gradient, expand_composites=True)


def differentiable_once(means: Sequence[tf.Tensor], own: Sequence[TapeGradient]) -> list[tf.Tensor]:
    """Return means as they are. An outer tape that differentiates them raises, where it would find no gradient.

    Args:
        own: this rank's gradients, which the outer tape knows.
    """

    @tf.custom_gradient
    def after_exchange(*own: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., None]]:
        def gradient(*upstream: tf.Tensor) -> None:
            raise ConfigError(
                "this is a gradient of means that a tape has exchanged, and an exchange has no gradient: leave the "
                "inner tape plain, and make the outer one distributed, whose gradient is the last"
            )

        return list(means), gradient

    return after_exchange(*tf.nest.flatten(own, expand_composites=True)) if own and means else list(means)


class _Distributed(tf.GradientTape):
    """GradientTape whose ``gradient`` is the mean over ranks."""

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target, sources, *args, **kwargs):
        """Return the means over ranks of the gradients; None for a source that no path reaches on any rank. A graph
        knows that from the first step alone: a rank that has a gradient for such a source later is refused."""
        gradients = super().gradient(target, sources, *args, **kwargs)
        flat, variables = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        for source in variables:
            if not isinstance(value_of(source) if hasattr(source, "value") else source, tf.Variable):
                raise ConfigError(f"gradients are exchanged for variables; a source is {type(source).__name__}")
            if is_overwritten(source):  # a compressed mean would become its value
                raise ConfigError(
                    f"{source.path!r} becomes what its gradient is, as float8's scales do, which a tape cannot "
                    "exchange: use grace.DistributedOptimizer, which takes the largest of all ranks"
                )
        if not variables:
            return gradients
        session = self._grace_session(variables)
        # An outer tape would look for the gradient of each operation of the exchange.
        means = session.exchange([gradient_free(gradient) for gradient in flat], variables)
        known = tf.executing_eagerly()
        values = [
            mean.value if known or g is not None else session.mean_or_none(i, mean)
            for i, (g, mean) in enumerate(zip(flat, means, strict=True))
        ]
        found = [value for value in values if value is not None]
        tensors = tf.nest.flatten(found, expand_composites=True)
        own = [gradient for gradient in flat if gradient is not None]
        once = iter(tf.nest.pack_sequence_as(found, differentiable_once(tensors, own), expand_composites=True))
        return tf.nest.pack_sequence_as(gradients, [None if value is None else next(once) for value in values])

    def jacobian(self, *args: Any, **kwargs: Any) -> None:
        """Refuse Jacobians, whose rows TensorFlow takes by ``gradient`` in a loop that it makes parallel.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "this tape exchanges gradients, and a Jacobian's rows would each be an exchange: take it of a tape of its "
            "own, which is not distributed, and average it by grace.allreduce"
        )

    batch_jacobian = jacobian

    def _grace_session(self, variables: list[AnyVariable]) -> GradientExchange:
        exchange, options = self._grace
        if exchange is not None:
            return exchange
        # Loops make a tape for every step, so the exchange (and its state) is an attribute of the first variable.
        owner = value_of(variables[0])
        exchanges = owner.__dict__.setdefault("_grace_exchanges", {})
        key = (repr(sorted(options.items(), key=lambda item: item[0])), tuple(id(value_of(v)) for v in variables))
        if key not in exchanges:
            exchanges[key] = GradientExchange(**options)
        return exchanges[key]


@accept_grace_argument
def DistributedGradientTape(
    tape: tf.GradientTape,
    compressor: CompressorArg | None = None,
    *,
    exchange: GradientExchange | None = None,
    **options: Any,
) -> tf.GradientTape:
    """Make a tape whose ``gradient`` returns the mean over ranks, exchanged compressed.

    The tape is changed in place and returned. It may be made before or after the forward pass, once per step;
    tapes with the same options for the same variables go on from one another. To save what the exchange
    remembers, make a :class:`GradientExchange` before the loop and pass it.

    Args:
        tape: the tape.
        compressor: spec, dict or object; "none" if left out.
        exchange: a GradientExchange, instead of the compressor and the options.
        options: further ones of :class:`GradientExchange`, and GRACE's ``grace=``, a communicator object.

    Raises:
        ConfigError: what was given cannot work; nothing was exchanged.

    >>> import grace
    >>> engine = grace.init("local")
    >>> w = tf.Variable([1.0, 2.0])
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(w * w)
    >>> DistributedGradientTape(tape, "topk(ratio=0.5)").gradient(loss, w).numpy()
    array([0., 4.], dtype=float32)
    >>> grace.shutdown()
    """
    check_tape(tape)
    if isinstance(tape, _Distributed):
        raise ConfigError("this tape is distributed already")
    compressor = compressor_for(None, options.pop("compression", None), compressor)
    check_arguments([name for name in options if name not in ARGUMENTS], "DistributedGradientTape")
    check_not_distribute()
    if isinstance(compressor, GradientExchange):
        raise ConfigError("a GradientExchange is given by its name: DistributedGradientTape(tape, exchange=exchange)")
    if exchange is not None and not isinstance(exchange, GradientExchange):
        raise ConfigError(f"exchange= takes a grace.tensorflow.GradientExchange, not {exchange!r}")
    if exchange is not None and (compressor is not None or options):
        raise ConfigError("the exchange holds its compressor and options; do not pass them as well")
    tape.__class__ = type(type(tape).__name__, (_Distributed, type(tape)), {})
    tape._grace = exchange, {"compressor": compressor, **options}
    return tape
