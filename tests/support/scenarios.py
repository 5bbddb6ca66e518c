"""Training scripts drawn from a seed, and what must hold after every step of each.

A scenario says which model, method, optimizer and habits a script has; :func:`trained` runs it on this rank. After
every step all ranks compare:

- the bits of all weights are the same on all ranks;
- feedback identity, where there is one compression and residuals, or none: what was brought is the mean over ranks of
  (gradient + residual before - residual after); the mean itself, where nothing is compressed;
- a step that overflowed on one rank changes no memory and no weight;
- what memories hold is finite.

Where ranks train alone (outer rounds), their anchors are compared in place of weights, and weights after the last
round.

:func:`trained` with ``stop`` saves everything at that step and goes on with new objects: the weights of all later steps
must be those of the run that was not stopped.
"""

import contextlib
import dataclasses
import math
import random
import warnings
from typing import Any

import torch

import grace
from grace.core.registry import legal_communicators, legal_memories, make
from grace.strategy.builders import StreamingDiLoCo
from tests.support.training import digest

STEPS = 7
METHODS = (
    *("none", "none", "fp16", "bf16", "qsgd(levels=7)", "qsgd(levels=1, bucket_size=5000)", "natural", "terngrad"),
    *("onebit", "signsgd", "signum(momentum=0.5)", "efsignsgd", "topk(ratio=0.1)", "topk(ratio=0.1)"),
    *("randomk(ratio=0.2)", "randomk(ratio=0.2, unbiased=True)", "threshold(value=0.3)", "adaptive(ratio=0.1)"),
    *("dgc(ratio=0.1, warmup_steps=3)", "dynamic8", "sketch(quantiles=8)", "inceptionn(error_bound=0.1)"),
    *("powersgd(rank=2)", "powersgd(rank=1, warm_start=False)"),
    *("topk(ratio=0.2) | qsgd(levels=7)", "topk(ratio=0.2) | fp16", "randomk(ratio=0.2) | natural"),
)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One training script."""

    seed: int
    compressor: str
    memory: str
    communicator: str
    optimizer: str
    dtype: str
    scheduler: bool
    two: bool
    passes: int
    pausing: bool
    clip: bool
    metric: bool
    scale: float
    overflow: int
    zero: str
    op: str
    predivide: float
    group_bytes: int
    full: bool
    stop: int
    outer: str
    period: int
    fragments: int
    delay: int
    merge: float

    @property
    def has_identity(self) -> bool:
        """True if the mean follows from what ranks had and have: one compression and residuals, or none at all."""
        made = make("compressor", self.compressor)
        if self.outer:
            return False  # drifts are exchanged, and not gradients
        if made.votes or "staleness=" in self.communicator or self.memory not in ("none", "residual"):
            return False
        if self.communicator not in ("allreduce", "allgather", "broadcast") and not made.traits.exact:
            return False
        return self.memory == "residual" or made.traits.exact


def drawn(seed: int) -> Scenario:
    """The scenario of a seed."""
    choose = random.Random(seed)
    compressor = choose.choice(METHODS)
    made = make("compressor", compressor)
    memories = [name for name in legal_memories(made) if not (made.noisy and name != "none")]
    memory = choose.choice([made.traits.memory, *memories])
    communicators = [c for c in legal_communicators(made) if c != "scatter_reduce" or memory in ("none", "residual")]
    communicator = choose.choice([made.traits.communicator, *communicators])
    if communicator == "reduce_broadcast" and choose.random() < 0.5 and made.traits.rounds == 1:
        communicator = choose.choice(["reduce_broadcast(destination=1)", "reduce_broadcast(staleness=2)"])
    once = memory == "dgc" or made.owns_momentum  # momentum
    optimizer = choose.choice(["sgd", "adam", "closure"] if not once else ["sgd", "closure"])
    if optimizer == "sgd" and not once and choose.random() < 0.5:
        optimizer = "momentum"
    if compressor == "none" and choose.random() < 0.3:
        optimizer = "lbfgs"
    closure = optimizer in ("closure", "lbfgs")
    scale = choose.choice([0.0, 0.0, 1024.0, 65536.0]) if not closure else 0.0
    delayed = "staleness" in communicator
    rest = Scenario(
        seed=seed,
        compressor=compressor,
        memory=memory,
        communicator=communicator,
        optimizer=optimizer,
        dtype=choose.choice(["float32", "float32", "mixed"]) if optimizer != "lbfgs" and not scale else "float32",
        scheduler=choose.random() < 0.3,
        two=choose.random() < 0.3 and not closure and not scale,
        passes=choose.choice([1, 1, 2]) if not closure else 1,
        pausing=choose.random() < 0.5,
        clip=choose.random() < 0.3 and not closure,
        metric=choose.random() < 0.5,
        scale=scale,
        overflow=choose.randrange(2, STEPS) if scale and choose.random() < 0.7 and not delayed else 0,
        zero=choose.choice(["none", "zeros", "model"]),
        op=choose.choice(["average", "average", "sum"]),
        predivide=choose.choice([1.0, 1.0, 4.0]),
        group_bytes=choose.choice([1, 1500, 25 << 20]),
        full=choose.random() < 0.5,
        stop=choose.randrange(1, STEPS),
        outer="",
        period=1,
        fragments=1,
        delay=0,
        merge=0.0,
    )
    if closure or delayed or once or made.votes or choose.random() < 0.7:  # drawn last: other seeds stay what they were
        return rest
    fragments = choose.choice([1, 2])
    return dataclasses.replace(
        rest,
        op="average",
        predivide=1.0,
        outer=choose.choice(["none", "sgd(lr=0.8, momentum=0.5)", "nesterov(lr=0.7, momentum=0.6)"]),
        period=choose.choice([1, 2, 3]) if fragments == 1 else 4,
        fragments=fragments,
        delay=choose.choice([0, 1]) if fragments == 2 else 0,
        merge=choose.choice([0.0, 0.5]) if fragments == 2 else 0.0,
    )


class Model(torch.nn.Module):
    """All kinds of parameters: matrices, vectors, one without dimensions, one without elements, tied, frozen, of other
    dtypes, with rows, and a layer that some ranks leave out in some steps."""

    def __init__(self, mixed: bool):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(20, 30))
        self.kernel = torch.nn.Parameter(torch.randn(6, 4, 3))
        self.vector = torch.nn.Parameter(torch.randn(333))
        self.tied = torch.nn.Linear(30, 20, bias=False)
        self.tied.weight = self.matrix
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.sometimes = torch.nn.Parameter(torch.randn(40, 3))
        self.never = torch.nn.Parameter(torch.randn(9))
        self.narrow = torch.nn.Parameter(torch.randn(70).to(torch.bfloat16 if mixed else torch.float32))
        self.register_buffer("count", torch.tensor(0))
        self.rows = torch.nn.Embedding(12, 5, sparse=True)

    def loss(self, step: int, micro: int, rank: int, sparse: bool) -> torch.Tensor:
        """A convex function of the weights, another one on each rank, in each step and each pass."""
        noise = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
        total = torch.zeros(())
        for name, p in self.named_parameters():
            left_out = name in ("never", "rows.weight") or (name == "sometimes" and (step + rank) % 3 == 0)
            if left_out or not p.requires_grad:
                continue
            given = torch.randn(p.shape, generator=noise)
            total = total + (p.float() * given).sum() + 0.05 * p.float().square().sum()
        if sparse:
            rows = self.rows(torch.randint(12, (rank + 3,), generator=noise))
            total = total + (rows * torch.randn(rows.shape, generator=noise)).sum()
        return total


def _sum_of_ranks() -> float:
    """A user's own metric, summed by the engine itself: ranks count from 1."""
    mine, engine = torch.tensor([float(grace.rank() + 1)]), grace.init().name
    if engine == "torch":
        torch.distributed.all_reduce(mine)
        return float(mine)
    if engine == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.allreduce(float(mine))
    import horovod.torch as hvd

    return float(hvd.allreduce(mine, op=hvd.Sum, name="metric"))


def _optimizer(s: Scenario, parameters: list[Any]) -> torch.optim.Optimizer:
    kinds = {
        "sgd": lambda: torch.optim.SGD(parameters, 0.05),
        "closure": lambda: torch.optim.SGD(parameters, 0.05),
        "momentum": lambda: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, 0.01),
        "lbfgs": lambda: torch.optim.LBFGS(parameters, 0.5, max_iter=3, line_search_fn="strong_wolfe"),
    }
    return kinds[s.optimizer]()


def _exchange(s: Scenario) -> dict[str, Any]:
    """The arguments that say how gradients, or drifts, are exchanged."""
    how = {"compressor": s.compressor, "memory": s.memory, "communicator": s.communicator}
    if not s.outer:
        return how
    if s.fragments == 1:
        return {**how, "outer": s.outer, "period": s.period}
    rounds = {"period": s.period, "fragments": s.fragments, "delay": s.delay, "merge": s.merge}
    return {"strategy": StreamingDiLoCo(**how, optimizer=s.outer, **rounds)}


class Script:
    """One rank's run of a scenario: model, optimizers, schedulers and scaler."""

    def __init__(self, s: Scenario):
        self.s, self.wrong = s, []
        torch.manual_seed(s.seed + 100 * grace.rank())  # rank 0's values are to be everybody's
        self.model = Model(s.dtype == "mixed")
        made = make("compressor", s.compressor)
        rows = s.memory in ("none", "residual") and not (made.stateful or made.votes or made.traits.rounds > 1)
        self.sparse = rows and s.optimizer in ("sgd",) and not s.scale and not s.clip
        self.model.rows.weight.requires_grad_(self.sparse)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=s.scale, growth_interval=2) if s.scale else None
        parameters = [p for p in self.model.parameters() if p.requires_grad or p is self.model.frozen]
        half = len(parameters) // 2 if s.two else len(parameters)
        self.optimizers = []
        for own in filter(None, (parameters[:half], parameters[half:])):
            plain = _optimizer(s, own)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.optimizers.append(
                    grace.DistributedOptimizer(
                        plain,
                        self.model,
                        **_exchange(s),
                        backward_passes_per_step=1 if s.pausing else s.passes,
                        op=s.op,
                        gradient_predivide_factor=s.predivide if s.op == "average" else 1.0,
                        group_bytes=s.group_bytes,
                        grad_scaler=self.scaler,
                        seed=s.seed,
                    )
                )
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7) for optimizer in self.optimizers if s.scheduler
        ]
        self.gather = self.optimizers[0]._grace.runner.backend.allgather_object

    # -- a step ----------------------------------------------------------------------------------------

    def step(self, step: int) -> str:
        """One step, and its checks; a digest of the weights after it."""
        before, weights = self.memories(), digest(self.model.state_dict())
        brought = self._closure(step) if self.s.optimizer in ("closure", "lbfgs") else self._plain(step)
        skipped = self.s.overflow == step and not self.s.outer  # the rank whose gradients overflow skips alone
        after, now = self.memories(), digest(self.model.state_dict())
        if skipped:
            self.expect(now == weights, "an overflow reached the weights")
            self.expect(digest(before) == digest(after), "an overflow reached a memory")
        elif brought is not None and self._payloads_overflow(before, *brought):
            self.expect(self.s.two or digest(before) == digest(after), "an overflow of a payload reached a memory")
        elif brought is not None:
            self._check_identity(before, after, *brought)
        for scheduler in self.schedulers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()
        for name, value in after.items():
            self.expect(torch.isfinite(value).all(), f"the memory {name} is not finite")
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.anchor())
            self.compare(f"step {step}")
        return now

    def compare(self, when: str) -> None:
        """Fail on all ranks if something is wrong on one, or the ranks' weights differ."""
        everyone = self.gather((digest(self.model.state_dict()), self.wrong))  # no rank waits for one that has failed
        wrong = sorted({one for _, found in everyone for one in found})
        if len({bits for bits, _ in everyone}) > 1:
            parts = self.gather({name: digest(value) for name, value in self.model.state_dict().items()})
            wrong += [f"the ranks' {name} differs" for name in parts[0] if len({part[name] for part in parts}) > 1]
        assert not wrong, f"{when}: {'; '.join(wrong)}"

    def flush(self) -> str:
        """The last round, where ranks train alone; a digest of the weights after it."""
        for optimizer in self.optimizers:
            optimizer.flush()
        self.compare("after the last round")
        return digest(self.model.state_dict())

    def expect(self, right: Any, otherwise: str) -> None:
        """Remember what is wrong until the end of the step."""
        if not right:
            self.wrong.append(otherwise)

    def _plain(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        s = self.s
        self._clear()
        for micro in range(s.passes):
            loss = self.model.loss(step, micro, grace.rank(), self.sparse)
            loss = self.scaler.scale(loss) if self.scaler else loss
            if s.overflow == step and grace.rank() == 1 and micro == 0:
                loss = loss + (self.model.vector[:2] * math.inf).sum()
            if s.pausing and micro < s.passes - 1:
                with self.optimizers[0].no_sync(), self.optimizers[-1].no_sync():
                    loss.backward()
            else:
                loss.backward()
        own = self._gradients()
        if s.metric:
            metric = _sum_of_ranks()
            total = grace.size() * (grace.size() + 1) / 2
            self.expect(metric == total, "a metric was paired with something else")
        for optimizer in self.optimizers:
            optimizer.synchronize()
        means = self._gradients()
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if s.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        return own, means

    def _closure(self, step: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
        own: list[Any] = []

        def closure() -> torch.Tensor:
            self._clear()
            loss = self.model.loss(step, 0, grace.rank(), self.sparse)
            loss.backward()
            own.append(self._gradients())
            return loss

        loss = self.optimizers[0].step(closure)
        self.expect(len(set(self.gather(float(loss)))) == 1, "the ranks' losses differ")
        return (own[0], self._gradients()) if len(own) == 1 else None

    def _clear(self) -> None:
        if self.s.zero == "model" and self.s.optimizer not in ("closure", "lbfgs"):
            self.model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.s.zero != "zeros")

    def _gradients(self) -> dict[str, Any]:
        scale = self.scaler.get_scale() if self.scaler else 1.0
        return {
            name: None if p.grad is None else p.grad.to_dense().float() / scale
            for name, p in self.model.named_parameters()
        }

    # -- checks ----------------------------------------------------------------------------------------

    def memories(self) -> dict[str, torch.Tensor]:
        """Return the memories' tensors, by kind, variable and field; in units of the gradient."""
        found = {}
        for optimizer in self.optimizers:
            for kind, values in optimizer._grace.runner.state().items():
                scale = optimizer._grace.context.loss_scale if "memory" in kind else 1.0
                for name, value in values.items():
                    for key, item in value.items() if isinstance(value, dict) else [("", value)]:
                        found[f"{kind}:{name}:{key}"] = torch.as_tensor(item).detach() / (1.0 if key == "lr" else scale)
        return found

    def _payloads_overflow(self, before, own, means) -> bool:
        """Return True if means show an overflow that no gradient has: scaled, they may be too much for float16."""
        found = [name for name, mean in means.items() if mean is not None and not torch.isfinite(mean).all()]
        if not self.s.has_identity or not any(self.gather(bool(found))):
            return False
        zero, largest = torch.zeros(()), 0.0
        for name, gradient in own.items():
            x = (zero if gradient is None else gradient) + before.get(f"memory:{name}:", zero)
            largest = max(largest, float(x.abs().max()) if x.numel() else 0.0)
        reached = self.s.scale * sum(self.gather(largest)) > torch.finfo(torch.float16).max
        self.expect("fp16" in self.s.compressor and reached, f"the means of {', '.join(found)} are not finite")
        return True

    def _check_identity(self, before, after, own, means) -> None:
        s = self.s
        if not s.has_identity:
            return
        factor = grace.size() if s.op == "sum" else 1
        for name, mean in means.items():
            if mean is None:
                continue
            kept = [state.get(f"memory:{name}:", torch.zeros(())) for state in (before, after)]
            there = own[name] if own[name] is not None else torch.zeros(mean.shape)
            sent = there.double() + kept[0] - kept[1]
            each = self.gather(sent)
            wanted = sum(each) / grace.size() * factor
            # What ranks send may cancel, and is rounded before.
            size = max([1e-3, *(float(one.abs().max()) for one in each if one.numel())])
            rough = 0.02 if "16" in s.compressor or name == "narrow" else 1e-4
            worst = float((mean - wanted).abs().max()) if wanted.numel() else 0.0
            self.expect(worst <= rough * size, f"{name}: {worst} of {size} is lost or made up")

    # -- stopping --------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """All that a user saves."""
        warnings.filterwarnings("ignore", message=".* holds the memories of this rank alone")  # each keeps its own
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizers": [o.full_state_dict() if self.s.full else o.state_dict() for o in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": self.scaler and self.scaler.state_dict(),
            "zeros": {n: torch.zeros_like(p.grad) for n, p in self.model.named_parameters() if p.grad is not None},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from it."""
        self.model.load_state_dict(saved["model"])
        if self.s.zero == "zeros":  # a gradient of zeros takes part in the exchange, other than none at all
            for name, zeros in saved["zeros"].items():
                self.model.get_parameter(name).grad = zeros
        states = saved["optimizers"] + saved["schedulers"]
        for one, state in zip(self.optimizers + self.schedulers, states, strict=True):
            one.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])


def trained(s: Scenario, stop: int = 0) -> list[str]:
    """Digests of the weights after each step, checked; with ``stop``, saved and resumed with new objects before it."""
    script = Script(s)
    found = []
    for step in range(1, STEPS):
        if step == stop:
            saved = script.save()
            del script
            script = Script(s)
            script.load(saved)
        found.append(script.step(step))
    return [*found, script.flush()] if s.outer else found


def compared(seed: int) -> str:
    """A scenario, straight and stopped; what is wrong, or nothing."""
    s = drawn(seed)
    try:
        straight = trained(s)
        resumed = trained(s, s.stop)
    except AssertionError as error:
        return f"{error}: {s}"
    return "" if straight == resumed else f"the run that was stopped differs: {s}"
