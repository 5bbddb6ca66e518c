"""Training steps of a model on this process alone, for planning: the times of computing, and the gradients."""

import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from grace.bench.common.progress import ShowProgress
from grace.cli.inputs import Loss, Model, framework_of
from grace.core.compressor import Tensor
from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError
from grace.exchange.sparse_rows import SparseRows, sum_rows
from grace.planner.step_simulation import Timeline
from grace.planner.step_timer import StepTimer

WARM, STEPS, LEAST = 3, 10, 3
"""Numbers of steps that are not timed, of timed steps, and of timed steps when time is short."""
SECONDS = 20.0
"""Seconds after which no further step is begun, if there were enough."""
LR = 1e-4
"""Learning rate of plain SGD; small, since weights do not matter here."""


class LocalSteps(NamedTuple):
    """Times of a step's parts, and the last step's gradients by name; of sparse variables the rows that there are."""

    timeline: Timeline
    gradients: dict[str, Tensor | SparseRows]

    @property
    def rows(self) -> dict[str, float]:
        """Number of rows of each sparse gradient."""
        return {name: float(x.values.shape[0]) for name, x in self.gradients.items() if isinstance(x, SparseRows)}


def run_steps(model: Model, loss: Loss, variables: Sequence[Variable], progress: ShowProgress) -> LocalSteps:
    """Run some steps of plain SGD on one batch, which change the model's weights.

    In torch a hook notes when each gradient is there. In TensorFlow all are there when backward ends, since exchanges
    begin then; forward and backward are timed as compiled functions. A ConfigError says which step failed, or which
    gradient is not finite."""
    run = _run_torch if framework_of(model) == "torch" else _run_keras
    try:
        found = run(model, loss, variables, progress)
    except ConfigError:
        raise
    except Exception as error:  # the user's code
        raise ConfigError(f"a step of the model failed: loss(model): {type(error).__name__}: {error}") from error
    for name, gradient in found.gradients.items():
        x = gradient.values if isinstance(gradient, SparseRows) else gradient
        # NaN and Inf survive the sum; tensors of TensorFlow have no method for it
        if not math.isfinite(float((x * x).sum() if hasattr(x, "sum") else np.square(x).sum())):
            raise ConfigError(f"the gradient of {name!r} is not finite after {WARM + STEPS} steps with lr={LR}")
    return found


def _steps(seconds: float) -> Iterator[int]:
    """Yield the numbers of the steps, those that are not timed first; fewer when the seconds are over."""
    ends = time.monotonic() + seconds
    for step in range(WARM + STEPS):
        yield step
        if step >= WARM + LEAST - 1 and time.monotonic() > ends:
            return


def _run_torch(model: Model, loss: Loss, variables: Sequence[Variable], progress: ShowProgress) -> LocalSteps:
    import torch

    named = dict(model.named_parameters())
    parameters = {n: p for n, p in zip(unwrap_names(list(named)), named.values(), strict=True) if p.requires_grad}
    on_gpu = any(p.is_cuda for p in parameters.values())
    optimizer = torch.optim.SGD(parameters.values(), lr=LR)
    timer = StepTimer()

    def wait() -> None:  # launches return before the GPU has computed
        if on_gpu:
            torch.cuda.synchronize()

    def mark_ready(name: str, parameter: object) -> None:
        wait()
        timer.ready(name)

    hooks = [p.register_post_accumulate_grad_hook(partial(mark_ready, name)) for name, p in parameters.items()]
    try:
        for step in _steps(SECONDS):
            progress("forward and backward", step / (WARM + STEPS))
            optimizer.zero_grad()
            if step == WARM:
                wait()
                timer.begin()
            loss(model).backward()
            wait()
            timer.mark("computed")
            timer.mark("exchanged")  # at once: this process has nobody to exchange with
            optimizer.step()
            wait()
            timer.end(step >= WARM)
    finally:
        for handle in hooks:
            handle.remove()
    timeline = timer.timeline([variable.name for variable in variables])
    if timeline is None:
        raise ConfigError("backward reached none of the model's parameters: loss(model) does not depend on them")
    gradients: dict[str, Tensor | SparseRows] = {}
    for name, p in parameters.items():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.detach()
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            gradients[name] = SparseRows(gradient.values(), gradient.indices()[0])
        else:
            gradients[name] = gradient.clone()
    return LocalSteps(timeline, gradients)


def _run_keras(model: Model, loss: Loss, variables: Sequence[Variable], progress: ShowProgress) -> LocalSteps:
    tf: Any = sys.modules["tensorflow"]
    keras: Any = sys.modules["keras"]
    trained = model.trainable_variables
    optimizer = keras.optimizers.SGD(LR)
    optimizer.build(trained)

    @tf.function
    def forward() -> Tensor:
        return loss(model)

    @tf.function
    def forward_and_backward() -> list[Tensor]:
        with tf.GradientTape() as tape:
            value = loss(model)
        return tape.gradient(value, [v.value for v in trained], unconnected_gradients="zero")

    @tf.function
    def update(gradients: list[Tensor]) -> None:
        optimizer.apply(gradients, trained)

    gradients = forward_and_backward()  # for the update alone; it is also the tracing of the function
    medians = []
    for number, run in enumerate((forward, forward_and_backward, partial(update, gradients))):
        times = []
        for step in _steps(SECONDS / 3):
            progress("forward and backward", (number + step / (WARM + STEPS)) / 3)
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times[WARM:]))
    alone, both, apply = medians
    backward = max(0.0, both - alone)
    found: dict[str, Tensor | SparseRows] = {}
    for variable, gradient in zip(variables, gradients, strict=True):
        rows = isinstance(gradient, tf.IndexedSlices)
        found[variable.name] = sum_rows(SparseRows(gradient.values, gradient.indices)) if rows else gradient
    return LocalSteps(Timeline({v.name: backward for v in variables}, min(alone, both), backward, apply), found)
