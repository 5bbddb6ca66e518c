"""Step runners of tensors of some shapes, whose buckets are encoded in one pass or variable by variable."""

import torch

import grace
from grace.core.backend import LocalBackend
from grace.core.context import Context
from grace.core.variable import Variable
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner


def fuses(bucket, fused):
    """Let a bucket's next round trips encode in one pass, or variable by variable."""
    bucket.fuses, bucket.program = fused, None


class Trained:
    """A runner of tensors of some shapes, and its gradients; the means go to tensors with strides if it says so."""

    strided = False

    def __init__(self, spec, memory, shapes, apart, backend=None, dtype=torch.float32, communicator=None):
        backend = backend or LocalBackend()
        found = [Variable(f"v{i}", shape, str(dtype)[6:], device="cpu") for i, shape in enumerate(shapes)]
        self.lr, self.method = 1.0, grace.make("compressor", spec).name
        context = Context(lr=lambda name: self.lr, rank=backend.rank, size=backend.size)
        plan = UniformPlan(spec, memory, communicator)
        self.runner = build_step_runner(lambda: found, lambda: plan, backend, context)
        for bucket in self.runner.buckets:
            bucket.fuses = not apart

    def step(self, gradients, present, discard=False):
        by_name = {f"v{i}": (gradient, here) for i, (gradient, here) in enumerate(zip(gradients, present, strict=True))}
        outs = {name: gradient.clone() for name, (gradient, _) in by_name.items() if gradient.is_contiguous()}
        if self.strided:
            outs = {name: torch.stack([out, out], -1)[..., 0] for name, out in outs.items()}
        for bucket in self.runner.buckets:
            mine = [by_name[v.name] for v in bucket.variables]
            self.runner.start_round_trip(bucket, [gradient for gradient, _ in mine], [here for _, here in mine])
        if discard:
            return self.runner.discard()

        def out(bucket):
            found = [outs.get(v.name) for v in bucket.variables]
            return [None if o is None or o.dtype != torch.float32 else o for o in found]

        outcomes = self.runner.finish_step(out)
        return {o.variable.name: None if o.value is None else bits(o.value) for o in outcomes}

    def remembered(self):
        return remembered(self.runner, bits)

    @property
    def codecs(self):
        """The codecs of the buckets that the method carries; "none" without a memory sends other dtypes as they are."""
        mine = [b for b in self.runner.buckets if b.communicator.compressor.name == self.method]
        return [b.program.codec for b in mine if self.method != "none" or b.variables[0].dtype == "float32"]


def bits(value):
    return value.float().contiguous().cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def drawn(rng, shapes, dtype):
    """Gradients, some of them views with strides, and which of them are there."""
    gradients, present = [], rng.random(len(shapes)) > 0.15
    for shape in shapes:
        x = torch.tensor(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3)).to(dtype)
        wide = len(shape) > 1 and rng.random() < 0.3
        gradients.append(torch.stack([x, x], -1)[..., 0] if wide else x)
    return [g if here else torch.zeros_like(g) for g, here in zip(gradients, present, strict=True)], present.tolist()


def remembered(runner, bits):
    """The bits of all that a runner's parts keep."""
    flat = {}
    for kind, values in runner.state().items():
        for name, value in values.items():
            parts = value if isinstance(value, dict) else {"": value}
            flat |= {(kind, name, key): bits(part) for key, part in parts.items()}
    return flat
