"""A model's training steps on this process alone: what it computes when, and its gradients, for planning."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError
from grace.exchange.sparse_rows import SparseRows, sum_rows
from grace.planner.step import Timeline
from grace.planner.step_timer import StepTimer

WARM, STEPS, LEAST = 3, 10, 3
"""Steps that are not timed; that are, and how many of them in any case."""
SECONDS = 20.0
"""After which no further step is begun, if there were enough."""
LR = 1e-4
"""Of plain SGD, small: weights are of no matter here."""
Told = Callable[[str, float], Any]


class Ran(NamedTuple):
    """What some steps have shown.

    Attributes:
        timeline: when the model computes what.
        gradients: the last step's, by name; of sparse variables the rows that there are.
    """

    timeline: Timeline
    gradients: dict[str, Any]

    @property
    def rows(self) -> dict[str, float]:
        """How many rows sparse gradients have."""
        return {name: float(x.values.shape[0]) for name, x in self.gradients.items() if isinstance(x, SparseRows)}


def framework_of(model: Any) -> str:
    """ "torch", "tensorflow", or, of a list of variables, "numpy"."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return "torch"
    return "numpy" if isinstance(model, (list, tuple)) else "tensorflow"


def run(model: Any, loss: Callable[[Any], Any], variables: Sequence[Variable], told: Told = lambda w, d: None) -> Ran:
    """Some steps of plain SGD on one batch. The model's weights change.

    In torch a hook tells when each gradient is there. In TensorFlow all are when backward ends, since exchanges begin
    then; forward and backward are timed as compiled functions.

    Args:
        model: a torch module, or a Keras model.
        loss: the loss of a batch, of the model.
        variables: the model's.
        told: called with what is done, and how much of all.

    Raises:
        ConfigError: a step fails, or its gradients are not finite.
    """
    try:
        found = (_torch if framework_of(model) == "torch" else _keras)(model, loss, variables, told)
    except ConfigError:
        raise
    except Exception as error:  # the user's code
        raise ConfigError(f"a step of the model failed: loss(model): {type(error).__name__}: {error}") from error
    for name, gradient in found.gradients.items():
        x = gradient.values if isinstance(gradient, SparseRows) else gradient
        if not math.isfinite(float((x * x).sum() if hasattr(x, "sum") else np.square(x).sum())):
            raise ConfigError(f"the gradient of {name!r} is not finite after {WARM + STEPS} steps with lr={LR}")
    return found


def randoms(framework: str, variables: Sequence[Variable], seed: int) -> dict[str, Any]:
    """Gradients with Gaussian elements, of variables that are not sparse.

    Args:
        framework: whose tensors.
        variables: of what shapes.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    module: Any = sys.modules.get(framework)
    found = {}
    for variable in variables:
        if variable.sparse or not variable.numel:
            continue
        x = 0.01 * rng.standard_normal(variable.shape, np.float32)
        if framework == "torch":
            x = module.as_tensor(x, device=variable.device)
        elif framework == "tensorflow":
            x = module.constant(x)
        found[variable.name] = x
    return found


def _torch(model: Any, loss: Callable[[Any], Any], variables: Sequence[Variable], told: Told) -> Ran:
    torch: Any = sys.modules["torch"]
    named = dict(model.named_parameters())
    parameters = {n: p for n, p in zip(unwrap_names(list(named)), named.values(), strict=True) if p.requires_grad}
    on_gpu = any(p.is_cuda for p in parameters.values())
    wait: Callable[[], Any] = torch.cuda.synchronize if on_gpu else lambda: None
    optimizer, clock = torch.optim.SGD(parameters.values(), lr=LR), StepTimer()
    gradients: dict[str, Any] = {}

    def tells(name: str) -> Callable[[Any], None]:
        def ready(parameter: Any) -> None:
            wait()
            clock.ready(name)

        return ready

    hooks = [p.register_post_accumulate_grad_hook(tells(name)) for name, p in parameters.items()]
    try:
        ends = time.monotonic() + SECONDS
        for step in range(WARM + STEPS):
            told("forward and backward", step / (WARM + STEPS))
            optimizer.zero_grad()
            if step == WARM:
                wait()
                clock.begin()
            loss(model).backward()
            wait()
            for what in ("computed", "exchanged"):
                clock.mark(what)
            optimizer.step()
            wait()
            clock.end(step >= WARM)
            if step >= WARM + LEAST - 1 and time.monotonic() > ends:
                break
    finally:
        for hook in hooks:
            hook.remove()
    for name, p in parameters.items():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        if g.is_sparse:
            g = g.coalesce()
            gradients[name] = SparseRows(g.values(), g.indices()[0])
        else:
            gradients[name] = g.detach().clone()
    timeline = clock.timeline([variable.name for variable in variables])
    if timeline is None:
        raise ConfigError("backward reached none of the model's parameters: loss(model) does not depend on them")
    return Ran(timeline, gradients)


def _keras(model: Any, loss: Callable[[Any], Any], variables: Sequence[Variable], told: Told) -> Ran:
    tf: Any = sys.modules["tensorflow"]
    keras: Any = sys.modules["keras"]
    trained, optimizer = model.trainable_variables, keras.optimizers.SGD(LR)
    optimizer.build(trained)
    forward = tf.function(lambda: loss(model))

    @tf.function
    def both() -> Any:
        with tf.GradientTape() as tape:
            value = loss(model)
        return tape.gradient(value, [v.value for v in trained], unconnected_gradients="zero")

    gradients = both()
    update = tf.function(lambda given: optimizer.apply(given, trained))
    done, took = 0, []
    for run in (forward, both, lambda: update(gradients)):
        times = []
        ends = time.monotonic() + SECONDS / 3
        for step in range(WARM + STEPS):
            told("forward and backward", done / 3 / (WARM + STEPS))
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
            done += 1
            if step >= WARM + LEAST - 1 and time.monotonic() > ends:
                break
        took.append(statistics.median(times[WARM:]))
    alone, whole, apply = took
    backward = max(0.0, whole - alone)
    found = {}
    for variable, g in zip(variables, gradients, strict=True):
        rows = isinstance(g, tf.IndexedSlices)
        found[variable.name] = sum_rows(SparseRows(g.values, g.indices)) if rows else g
    return Ran(Timeline({v.name: backward for v in variables}, min(alone, whole), backward, apply), found)
