"""Outer rounds, in TensorFlow, of variables that ranks train alone."""

from collections.abc import Callable

import tensorflow as tf

from grace.core.compressor import Tensor
from grace.kernels import kernels_of
from grace.session.outer_rounds import OuterRounds
from grace.session.sharding import Shard
from grace.tensorflow.session import Session


def take_anchors(session: Session) -> None:
    """Take variables for anchors, eagerly or in a graph. Called before an update."""
    _act(session, lambda rounds: not rounds.has_anchors, OuterRounds.take_anchors)


def run_rounds(session: Session) -> None:
    """Run the rounds that are due, eagerly or in a graph. Called after the optimizer's step."""
    _act(session, lambda rounds: rounds.due, OuterRounds.run_due)


def _act(session: Session, due: Callable[[OuterRounds], bool], act: Callable[[OuterRounds], None]) -> None:
    """Call a method of the rounds if it is due. A graph passes all variables through the call, which orders it among
    their reads and updates."""
    if session.runner is None or not session.runner.outer_rounds:
        return
    fragments = session.runner.outer_rounds.fragments
    names = list(dict.fromkeys(shard.whole.name for fragment in fragments for shard in fragment.shards))
    variables = [session.variable(name) for name in names]

    def run() -> int:
        before = [tf.convert_to_tensor(variable) for variable in variables]
        dtypes = [value.dtype for value in before]
        after = tf.py_function(
            lambda *values: _run(session, act, dict(zip(names, values, strict=True))), before, dtypes
        )
        for variable, value in zip(variables, after, strict=True):
            variable.assign(tf.reshape(value, variable.shape))
        return 0

    tf.cond(tf.py_function(lambda: due(_rounds_of(session)), [], tf.bool), run, lambda: 0)


def _rounds_of(session: Session) -> OuterRounds:
    """Return the rounds of the runner that the session has now: it may be another one than when a graph was traced."""
    assert session.runner is not None
    return session.runner.outer_rounds


def _run(session: Session, act: Callable[[OuterRounds], None], values: dict[str, tf.Tensor]) -> list[tf.Tensor]:
    """Call a method of the rounds, and return the variables' values after it."""
    rounds = _rounds_of(session)
    whole = {name: session.inside(value) for name, value in values.items()}

    def read(shard: Shard) -> Tensor:
        return shard.slice_of(whole[shard.whole.name])

    def write(shard: Shard, value: Tensor) -> None:
        before = whole[shard.whole.name]
        k = kernels_of(before)
        value = k.cast(value, k.dtype(before))
        if shard.axis is not None:
            front = (slice(None),) * shard.axis
            before_shard, after_shard = (*front, slice(shard.start)), (*front, slice(shard.stop, None))
            value = k.concat([before[before_shard], value, before[after_shard]], shard.axis)
        whole[shard.whole.name] = value

    reading, writing = rounds.read, rounds.write
    rounds.read = read
    rounds.write = write
    try:
        with session.medium.computing():
            act(rounds)
    finally:
        rounds.read, rounds.write = reading, writing
    return [session.medium.outside(value) for value in whole.values()]
