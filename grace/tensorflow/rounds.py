"""Outer rounds, in TensorFlow, of variables that ranks train alone."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from grace.core.compressor import Tensor
from grace.kernels import kernels_of
from grace.session.outer_rounds import OuterRounds
from grace.session.sharding import Shard
from grace.tensorflow.sharding import cut, put
from grace.tensorflow.variables import value_of


def take_anchors(session: Any) -> None:
    """Take variables for anchors, eagerly or in a graph. Called before an update."""
    _act(session, lambda: not session.runner.outer_rounds.has_anchors, OuterRounds.take_anchors)


def run_rounds(session: Any) -> None:
    """Run the rounds that are due, eagerly or in a graph. Called after the optimizer's step."""
    _act(session, lambda: session.runner.outer_rounds.due, OuterRounds.run_due)


def connect(session: Any) -> None:
    """Let rounds read and write a session's variables, eagerly."""
    me = weakref.proxy(session)  # the runner must not keep the session alive
    session.runner.outer_rounds.read = partial(_read, me)
    session.runner.outer_rounds.write = partial(_write, me)


def _read(session: Any, shard: Shard) -> Tensor:
    with tf.init_scope():  # a state may be loaded while a graph is traced
        return session.inside(cut(shard, tf.convert_to_tensor(_variable(session, shard.whole.name))))


def _write(session: Any, shard: Shard, value: Tensor) -> None:
    with tf.init_scope():
        put(shard, _variable(session, shard.whole.name), session.medium.outside(value))


def _variable(session: Any, name: str) -> tf.Variable:
    return value_of(session.variables[session.names.index(name)])


def _act(session: Any, due: Callable[[], bool], act: Callable[[OuterRounds], None]) -> None:
    """Call a method of the rounds if it is due. A graph passes all variables through the call, which orders it among
    their reads and updates."""
    if session.runner is None or not session.runner.outer_rounds:
        return
    fragments = session.runner.outer_rounds.fragments
    names = list(dict.fromkeys(shard.whole.name for fragment in fragments for shard in fragment.shards))
    variables = [_variable(session, name) for name in names]

    def run() -> int:
        before = [tf.convert_to_tensor(variable) for variable in variables]
        dtypes = [value.dtype for value in before]
        after = tf.py_function(
            lambda *values: _run(session, act, dict(zip(names, values, strict=True))), before, dtypes
        )
        for variable, value in zip(variables, after, strict=True):
            variable.assign(tf.reshape(value, variable.shape))
        return 0

    tf.cond(tf.py_function(due, [], tf.bool), run, lambda: 0)


def _run(session: Any, act: Callable[[OuterRounds], None], values: dict[str, tf.Tensor]) -> list[tf.Tensor]:
    """Call a method of the rounds, and return the variables' values after it."""
    rounds = session.runner.outer_rounds
    whole = {name: session.inside(value) for name, value in values.items()}

    def read(shard: Shard) -> Any:
        return shard.slice_of(whole[shard.whole.name])

    def write(shard: Shard, value: Tensor) -> None:
        before = whole[shard.whole.name]
        k = kernels_of(before)
        value = k.cast(value, k.dtype(before))
        if shard.axis is not None:
            front = (slice(None),) * shard.axis
            others = before[(*front, slice(shard.start))], before[(*front, slice(shard.stop, None))]
            value = k.concat([others[0], value, others[1]], shard.axis)
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
