"""Small models that pipelines are tested with: what RaNNC's tests cover, and what is known to be hard."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from grace.pipeline.torch import atomic_subcomponents, capture, node_costs, plan_search
from grace.pipeline.torch.stage_builder import build_module, stage_specs
from tests.support.drawing import THOROUGH

ROWS = 8
plan_search.TIMED_ELEMENTS = 1 << 12  # how long an update takes decides nothing of toys


class FewParameters(nn.Module):
    """Two layers, and an activation without parameters between them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class ForkAndJoin(nn.Module):
    """Two branches of unequal length, joined."""

    def __init__(self):
        super().__init__()
        self.front, self.left, self.right, self.more = (
            nn.Linear(6, 8),
            nn.Linear(8, 4),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        y = self.front(x).sigmoid()
        return self.left(y) * self.more(F.relu(self.right(y)))


class SharedParameter(nn.Module):
    """One layer used at the beginning and at the end."""

    def __init__(self):
        super().__init__()
        self.shared, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.shared(torch.tanh(self.other(torch.tanh(self.shared(x))))))


class OneOperation(nn.Module):
    """No more than a product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4))

    def forward(self, x):
        return x @ self.weight


class TensorProduct(nn.Module):
    """Parameters that are computed with before they meet the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return torch.tanh(torch.einsum("ni,ik,kj->nj", x, self.a, self.b)) * self.scale.exp() + self.scale.exp()


def gated(x, gate):
    """A function of the user's in the graph."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b * gate, a], -1)


class FunctionInGraph(nn.Module):
    """A function that splits and joins."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.two(gated(self.one(x), torch.arange(4) / 4))


class LossAsOutput(nn.Module):
    """A model that returns its loss, of two inputs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x, y):
        return F.mse_loss(self.two(F.relu(self.one(x))), y)


class Convolutional(nn.Module):
    """Convolutions, pooling, in-place activations and a linear layer."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.one(x), inplace=True), 2)
        x = F.max_pool2d(F.relu(self.two(x), inplace=True), 2)
        return self.head(x.flatten(1))


class Residual(nn.Module):
    """Values that later, non-adjacent stages read, and in-place sums."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        first = y = self.layers[0](x)
        for layer in self.layers[1:]:
            z = layer(y)
            z += y
            y = F.relu(z, inplace=True)
        return self.head(y + first)


class TiedEmbedding(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.table(x)))).mean(1)


class Normalized(nn.Module):
    """Batch norm in training mode, one of them used twice, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm, self.last = (
            nn.Linear(6, 6),
            nn.Linear(6, 4),
            nn.BatchNorm1d(6),
            nn.BatchNorm1d(4),
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        self.seen = self.seen + x.detach().mean(0)
        return self.last(self.two(self.norm(F.relu(self.norm(self.one(x))))))


class Several(nn.Module):
    """Several inputs, a keyword, several outputs, dropout without effect, in-place writes to a part."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 6), nn.Linear(6, 4), nn.Dropout(0.0)

    def forward(self, x, shift, *, scale):
        h = self.one(x) + shift
        before = h * 2
        h[:, 0] = h[:, 0] * scale
        h = self.drop(h)
        return {"out": self.two(h), "hidden": [before + h, h]}


TOYS = (
    FewParameters,
    ForkAndJoin,
    SharedParameter,
    OneOperation,
    TensorProduct,
    FunctionInGraph,
    LossAsOutput,
    Convolutional,
    Residual,
    TiedEmbedding,
    Normalized,
    Several,
)
BY_NAME = {toy.__name__: toy for toy in TOYS}
_captured: dict[Any, capture.Captured] = {}


def capture_once(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> capture.Captured:
    """Capture a model, a toy only once for inputs of these shapes: ``torch.export`` takes most of a pipeline's time.

    A later toy of the same class gets the former one's graph, which nothing changes, with its own tensors.
    """
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    values = [*tensors.values(), *leaves]
    if THOROUGH or type(model) not in TOYS or any(value.is_meta for value in values if isinstance(value, torch.Tensor)):
        return capture.capture(model, args, kwargs)
    capture.check_hooks(model)
    forms = [
        (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else repr(value)
        for value in values
    ]
    modes = [module.training for module in model.modules()]
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    key = (type(model), *modes, *autocast, str(spec), *forms)
    if key not in _captured:
        _captured[key] = capture.capture(model, args, kwargs)
    found = _captured[key]
    return dataclasses.replace(
        found, attributes={**found.attributes, **{n: tensors[n] for n in found.attributes if n in tensors}}
    )


atomic_subcomponents.capture = capture_once


def made(name):
    """A toy model, the same every time."""
    torch.manual_seed(3)
    return BY_NAME[name]()


def batch(name, step=0, rows=ROWS):
    """(args, kwargs, target) of a step."""
    draw = torch.Generator().manual_seed(100 + step)
    y = torch.randn(rows, 9 if name == "TiedEmbedding" else 4, generator=draw)
    if name == "TiedEmbedding":
        return (torch.randint(0, 9, (rows, 3), generator=draw),), {}, y
    x = torch.randn(rows, *((2, 8, 8) if name == "Convolutional" else (6,)), generator=draw)
    if name == "LossAsOutput":
        return (x, y), {}, None
    if name == "Several":
        return (x, torch.randn(6, generator=draw)), {"scale": torch.randn(rows, generator=draw)}, y
    return (x,), {}, y


def loss_fn(output, target):
    """Return the loss of a toy's output; a mean over rows."""
    if target is None:
        return output
    if isinstance(output, dict):
        return F.mse_loss(output["out"], target) + output["hidden"][0].square().mean() + output["hidden"][1].mean()
    return F.mse_loss(output, target)


def halves(graph, count=2):
    """A graph's nodes in so many parts, in order, none of which parts nodes that must be together."""
    names = [node.name for node in graph.nodes]
    place = {name: i for i, name in enumerate(names)}
    spans = [(min(map(place.get, one)), max(map(place.get, one))) for one in graph.together]
    cuts = [i for i in range(1, len(names)) if not any(low < i <= high for low, high in spans)]
    if len(cuts) < count - 1:
        return None
    chosen = [cuts[(i + 1) * len(cuts) // count] for i in range(count - 1)]
    chosen = sorted(dict.fromkeys(chosen))
    if len(chosen) < count - 1:
        return None
    ends = [0, *chosen, len(names)]
    return [names[a:b] for a, b in itertools.pairwise(ends)]


def sgd(parameters):
    """Momentum shows gradients of all steps."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def rows(value, low, high, count):
    """Rows of whatever has that many."""
    cut = lambda one: one[low:high] if isinstance(one, torch.Tensor) and one.ndim and len(one) == count else one  # noqa: E731
    return torch.utils._pytree.tree_map(cut, value)


def alone(name, steps, microbatches, replicas=1, scale=1.0, clip=None):
    """Train in one process: return losses, the gradients of the last step, and the state. Batches have ``ROWS`` rows
    for each replica; micro-batches and replicas are means."""
    model, losses = made(name), []
    optimizer, count = sgd(model.parameters()), ROWS * replicas
    for step in range(steps):
        optimizer.zero_grad()
        given, total = batch(name, step, count), 0.0
        size = count // (microbatches * replicas)
        for part in range(microbatches * replicas):
            args, kwargs, target = rows(given, part * size, (part + 1) * size, count)
            loss = loss_fn(model(*args, **kwargs), target) / (microbatches * replicas)
            (loss * scale).backward()
            total += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        losses.append(total)
        optimizer.step()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, {key: value.clone() for key, value in model.state_dict().items()}


def estimated(batch, **ignored):
    """Costs that no machine has measured, so that plans of toys are the same on all, and no second capture."""
    return node_costs.estimate_costs(batch.atoms)


def unmeasured(*args, **settings):
    """A pipeline of any model, planned by costs that no machine has measured."""
    import grace

    with mock.patch.object(node_costs, "costs_by_rows", estimated):
        return grace.torch.Pipeline(*args, **settings)


def pipeline(name, model=None, example=True, **settings):
    """A pipeline of a toy, of two stages or as the settings say."""
    args, kwargs, _ = batch(name)
    given, loss = (args, kwargs) if example else None, None if name == "LossAsOutput" else loss_fn
    settings = {"optimizer": sgd, "microbatches": 2, "stages": None if "replicas" in settings else 2, **settings}
    return unmeasured(made(name) if model is None else model, given, loss, **settings)


def own_batch(engine, name, step):
    """(args, kwargs, target) of a step, of which a rank passes its replica's rows, or all."""
    count = ROWS * max(engine.mesh.replicas)
    given, low = batch(name, step, count), engine.replica * ROWS
    return rows(given, low, low + ROWS, count) if engine.inputs == "replica" else given


def run_steps(engine, name, numbers):
    """Steps of a toy's pipeline: the losses."""
    losses = []
    for step in numbers:
        args, kwargs, target = own_batch(engine, name, step)
        given = args if engine.loss_fn is None else (*args, target)
        losses.append(engine.step(*given, **kwargs).item())
    return losses


def piped(name, steps, **settings):
    """Train as :func:`alone` does, in a pipeline, each replica with its rows: return losses, this rank's gradients and
    tensors, and its stage and replica."""
    engine = pipeline(name, **settings)
    losses = run_steps(engine, name, range(steps))
    gradients = {key: p.grad.clone() for key, p in engine.parameters.items() if p.grad is not None}
    own = {**engine.parameters, **engine.buffers}
    state = {key: value.detach().clone() for key, value in own.items()}
    return losses, gradients, state, (engine.stage, engine.replica)


def check_is_alone(name, answers, expected, buffers=True):
    """Check what ranks have from :func:`piped` beside what :func:`alone` tells.

    Args:
        answers: the ranks', of which each stage has one.
        buffers: True if those that gradients do not train are the same too.
    """
    losses, gradients, state = expected
    seen = set()
    for got, own, values, place in answers:
        assert all(abs(a - b) <= 1e-5 * abs(b) + 1e-7 for a, b in zip(got, losses, strict=True)), (name, place)
        for key, value in own.items():
            assert torch.allclose(value, gradients[key], rtol=1e-4, atol=1e-6), (name, key, place)
        for key, value in values.items():
            if buffers or key in gradients:
                assert torch.allclose(value, state[key], rtol=1e-4, atol=1e-6), (name, key, place)
        seen |= values.keys()
    aliases = {"head.weight"} if name == "TiedEmbedding" else set()
    assert seen == state.keys() - aliases, name


def piped_all(names, steps, **settings):
    """Several models, one after the other."""
    found = {}
    for name in names:
        try:
            found[name] = piped(name, steps, **settings)
        except BaseException as error:
            error.add_note(f"of {name}")
            raise
    return found


def run_stages(atoms, stages, args, kwargs=None):
    """Run the stages one after the other in this process, and return the model's output."""
    captured = atoms.captured
    flat = dict(zip(captured.inputs, captured.flat(args, kwargs or {}), strict=True))
    specs = stage_specs(atoms, stages)
    received, out = {}, ()
    for spec in specs:
        module = build_module(atoms, spec, spec is specs[-1])
        out = module(*(received[name] for name in spec.receives), *(flat[name] for name in spec.inputs))
        received = dict(zip(spec.sends, out, strict=False))
    return torch.utils._pytree.tree_unflatten(out, captured.out_spec)
