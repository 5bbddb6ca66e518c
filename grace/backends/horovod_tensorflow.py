"""Horovod backend for TensorFlow: Horovod's operations, in graphs and eagerly."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.process_sets import ProcessSet

from grace.backends.horovod import HorovodBackend, Operation, alltoall_output
from grace.core.backend import Handle
from grace.errors import ConfigError
from grace.kernels.tensorflow.interop import as_array, as_tensor


class TensorFlowHorovodBackend(HorovodBackend):
    """Collectives of one Horovod process set.

    Eagerly an operation is run at once, and its handle is complete. In a step that a graph runs, the parts of an
    exchange are Python functions and its collectives are the graph's own operations: there a collective that is
    started is only recorded (:meth:`recording`), and :meth:`run` makes the operation.
    """

    hvd = hvd
    framework = "tensorflow"
    _functions: dict[tuple[str, str, int, tf.DType], Callable[[tf.Tensor], tf.Tensor]] | None = None
    """Functions of operations that one of several threads runs, by the operations' names; None in the main thread."""

    def __init__(self, process_set: "ProcessSet | None" = None, owns: bool = False):
        _check_not_elastic()
        super().__init__(process_set, owns)
        if not self.included:
            raise ConfigError("this rank is not in the process set; make no distributed optimizer on it")
        self._calls = itertools.count()
        self._recorded: list[Operation] | None = None

    @classmethod
    def join(cls) -> "HorovodBackend":
        """Return a backend over all ranks; initialize Horovod if it is not initialized yet."""
        _check_not_elastic()
        return super().join()

    # -- collectives -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Operation]]:
        """Return a context in which collectives that are started are recorded, in the list that it yields, and not
        run."""
        outer = self._recorded
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = outer

    def start(self, operation: Operation) -> Handle:
        if self._recorded is not None:
            self._recorded.append(operation)
        else:
            name = self.label or f"{self._call_prefix}{next(self._calls)}"
            run = self.run if self._functions is None else self._run_named
            if isinstance(operation.tensor, np.ndarray):  # the exchange computes with arrays
                operation.received = as_array(run(operation, as_tensor(operation.tensor), name))
            else:
                operation.received = run(operation, operation.tensor, name)
        return Handle(lambda: None, later=operation.result)

    def duplicate(self) -> "TensorFlowHorovodBackend":
        other = super().duplicate()
        other._functions = {}
        return other

    def _run_named(self, operation: Operation, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Run an operation in a function of its own.

        Eager operations have only their kind as a name, and Horovod refuses one of the same name as another under way.
        """
        assert self._functions is not None
        key = name, operation.kind, operation.root, tensor.dtype
        if key not in self._functions:
            flat = tf.TensorSpec([None], tensor.dtype)
            self._functions[key] = tf.function(lambda t: self.run(operation, t, name), [flat], autograph=False)
        return self._functions[key](tensor)

    def run(self, operation: Operation, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Run Horovod's operation on ``tensor``, eagerly or in a graph, under a name that all ranks give it."""
        options = {"name": name, "ignore_name_scope": True, "process_set": self.process_set}
        if operation.kind == "allgather":
            return hvd.allgather(tensor, **options)
        if operation.kind == "alltoall":
            return alltoall_output(hvd.alltoall(tensor, **options))
        if operation.kind == "gather":
            splits = tf.size(tensor) * tf.one_hot(operation.root, self.size, dtype=tf.int32)
            return alltoall_output(hvd.alltoall(tensor, splits=splits, **options))
        if operation.kind == "broadcast":
            return hvd.broadcast(tensor, self._global(operation.root), **options)
        if tensor.dtype == tf.bfloat16:
            return self._sum_bfloats(tensor, options)
        return hvd.allreduce(tensor, op=hvd.Sum, **options)

    def run_allreduce(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum over ranks, eagerly or in a graph."""
        return self.run(Operation("allreduce", tensor), tensor, name)

    def run_allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return all ranks' 1-d tensors, joined, eagerly or in a graph."""
        return self.run(Operation("allgather", tensor), tensor, name)

    def _sum_bfloats(self, tensor: tf.Tensor, options: dict[str, Any]) -> tf.Tensor:
        """Sum bfloat16, which Horovod does not know: each rank sums a part of the tensor in float32, and gathers the
        others'."""
        n = tf.size(tensor)
        length = -(-n // self.size)
        padded = tf.pad(tf.reshape(tensor, [-1]), [[0, self.size * length - n]])
        mine = alltoall_output(hvd.alltoall(tf.bitcast(padded, tf.int16), **options))
        parts = tf.reshape(tf.bitcast(mine, tf.bfloat16), [self.size, length])
        total = tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), 0), tf.bfloat16)
        gathered = hvd.allgather(tf.bitcast(total, tf.int16), **{**options, "name": f"{options['name']}.totals"})
        return tf.reshape(tf.bitcast(gathered, tf.bfloat16)[:n], tf.shape(tensor))

    def allgather_object(self, value: object) -> list[Any]:
        with tf.init_scope():  # at once, also while a graph is traced
            return super().allgather_object(value)

    def give_up(self) -> None:
        """Let all operations under way fail, on all ranks: operations of a graph cannot be ended one by one."""
        hvd.shutdown()


def _check_not_elastic() -> None:
    """Raise ConfigError in elastic mode: a rank that is lost would end the run in the middle, as if all had been
    done."""
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ConfigError(
            "Grace has no elastic mode for TensorFlow (horovodrun was given --min-np or --host-discovery-script): use "
            "horovodrun -np, and keras.callbacks.BackupAndRestore to go on after a failure"
        )
