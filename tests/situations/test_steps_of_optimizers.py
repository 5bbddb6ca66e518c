"""Optimizers as people write them: each of their steps is exchanged once, and all ranks' gradients count."""

import warnings
from collections import OrderedDict
from types import MethodType

import pytest
import torch

import grace
from tests.support.pipelines import unmeasured
from tests.support.pools import on_ranks
from tests.support.sharded import built, mesh_of, whole
from tests.support.sharded import loss_of as loss_in_shards
from tests.support.training import ddp, digest, loss_of, net, weights

STEPS = 5


def of_all_ranks(model, step, op="average"):
    """The loss of one process that has all ranks' data."""
    total = sum(loss_of(model, step, rank) for rank in range(grace.size()))
    return total / (grace.size() if op == "average" else 1)


def usual(model, optimizer, loss, step):
    optimizer.zero_grad()
    loss(model, step).backward()
    optimizer.step()


def compared(make, body=usual, op="average", schedule=False):
    """Train by an optimizer of this kind, distributed and, on all ranks' data, alone; exchanges that there were."""
    ours, alone = net(), net()
    plain, optimizer = make(alone.parameters()), make(ours.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (plain, optimizer) if schedule]
    optimizer = grace.DistributedOptimizer(optimizer, ours.named_parameters(), compressor="none", op=op)
    for step in range(STEPS):
        body(alone, plain, lambda model, step: of_all_ranks(model, step, op), step)
        body(ours, optimizer, loss_of, step)
        for scheduler in schedulers:
            scheduler.step()
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-4, atol=1e-5, msg=f"{make.__name__}: {name}")
    return optimizer.traffic.steps, digest(weights(ours))


# -- steps that call others -------------------------------------------------------------------------------------------


def levels(alone_on):
    """An optimizer whose step calls its parent's; only some ranks have ever made one of the parent's class."""

    class Parent(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Child(Parent):
        def step(self, closure=None):
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure)

    if grace.rank() in alone_on:
        Parent(net().parameters(), lr=0.1)
    return lambda parameters: Child(parameters, lr=0.02, momentum=0.9)


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups and state it shares; it does not call ``Optimizer.__init__``."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base, self.count = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        value = self.base.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                p.copy_(slow.lerp_(p, 0.5))
        return value

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Delegating:
    """Around another optimizer, of whose class it is and whose attributes it passes on (Lightning Fabric's)."""

    def __init__(self, base):
        self._base = base
        self.__class__ = type("Delegating", (Delegating, type(base)), {})

    def step(self, closure=None):
        return self._base.step(closure)

    def __getattr__(self, name):
        return getattr(self._base, name)


class Sharp(torch.optim.Optimizer):
    """Two backward passes a step, the second one away from the weights (SAM); the other optimizer makes the step."""

    def __init__(self, params, base):
        super().__init__(params, {})
        self.base = base(self.param_groups)

    @torch.no_grad()
    def first_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["from"] = p.clone()
            p.mul_(1.01)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, state in self.state.items():
            p.copy_(state["from"])
        self.base.step()
        self.zero_grad()


def lookahead(parameters):
    return Lookahead(torch.optim.SGD(parameters, lr=0.05))


def delegating(parameters):
    return Delegating(torch.optim.SGD(parameters, lr=0.05))


def sharp(parameters):
    return Sharp(parameters, lambda groups: torch.optim.SGD(groups, lr=0.05))


def in_two_steps(model, optimizer, loss, step):
    loss(model, step).backward()
    if loss is loss_of and grace.init().name == "horovod":
        optimizer.synchronize()  # as Horovod wants it before zero_grad()
    optimizer.first_step()
    loss(model, step).backward()
    optimizer.second_step()


def with_its_own_step(parameters):
    """A program that puts a step into an optimizer."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(p.grad.sign(), alpha=0.01)

    optimizer = torch.optim.SGD(parameters, lr=0.05)
    optimizer.step = MethodType(step, optimizer)
    return optimizer


# -- gradients that the program's own hooks take away -----------------------------------------------------------------


def beside(parameters):
    """Hooks of the program's, there before the optimizer, that add gradients up elsewhere (``main_grad``)."""

    def take(p):
        p.main_grad.add_(p.grad)
        p.grad = None

    parameters = list(parameters)
    for p in parameters:
        p.main_grad = torch.zeros_like(p)
        p.register_post_accumulate_grad_hook(take)
    return torch.optim.SGD(parameters, lr=0.05)


def from_beside(model, optimizer, loss, step):
    for p in model.parameters():
        p.main_grad.zero_()
    loss(model, step).backward()
    for p in model.parameters():
        p.grad = p.main_grad.clone()
    optimizer.step()
    optimizer.zero_grad()


def in_backward():
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    ours, alone, found = net(), net(), {}
    for model, loss in ((ours, loss_of), (alone, of_all_ranks)):
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(step)
            if model is ours:
                optimizers[p] = grace.DistributedOptimizer(optimizers[p], [(name, p)], compressor="none")
        for number in range(STEPS):
            loss(model, number).backward()
        found = {opt.traffic.steps for opt in optimizers.values() if model is ours} or found
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-4, atol=1e-5, msg=name)
    return found


ENGINES = pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])


@on_ranks(2)
def test_a_step_by_gradients_that_are_not_exchanged_yet_is_warned_of_once():
    """The first step of SAM: under DDP all ranks would go the same way."""

    def warned(first):
        model = net()
        optimizer = grace.DistributedOptimizer(sharp(model.parameters()), model.named_parameters(), compressor="none")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for step in range(3):
                first(model, optimizer, step)
                optimizer.first_step()
                loss_of(model, step).backward()
                optimizer.second_step()
        return [(one.category.__name__, one.message.args[0], one.filename == __file__) for one in found]

    def plain(model, optimizer, step):
        loss_of(model, step).backward()

    def of_means(model, optimizer, step):
        plain(model, optimizer, step)
        optimizer.synchronize()

    def of_its_own(model, optimizer, step):
        with optimizer.no_sync():
            plain(model, optimizer, step)

    ((kind, said, here),) = warned(plain)
    assert (kind, here) == ("UserWarning", True)
    assert "was changed between backward() and zero_grad()" in said
    assert "optimizer.synchronize()" in said
    assert "optimizer.no_sync()" in said
    assert warned(of_means) == warned(of_its_own) == []


@ENGINES
@on_ranks(2)
def test_each_step_is_exchanged_once_whatever_is_around_it(engine):
    found = {}
    for op in ("average", "sum"):
        for ranks in ((), (0,), (0, 1)):
            found[f"a parent made on ranks {ranks}, {op}"] = compared(levels(ranks), op=op)
    for schedule in (False, True):
        found[f"Lookahead, scheduler: {schedule}"] = compared(lookahead, schedule=schedule)
    found["a wrapper without hooks of its own"] = compared(delegating)
    found["a step of its own"] = compared(with_its_own_step)
    exchanges, weights = compared(sharp, in_two_steps)
    found["SAM"] = exchanges - STEPS, weights  # what the first of the two brings is dropped
    first = found
    assert {name: exchanges for name, (exchanges, _) in first.items()} == dict.fromkeys(first, STEPS)
    return first


@ENGINES
@on_ranks(2)
def test_gradients_that_a_hook_took_are_not_exchanged_and_what_the_program_puts_there_is(engine):
    assert compared(beside, from_beside)[0] == STEPS
    assert in_backward() == {STEPS}


# -- DDP's hook and FSDP's --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["levels", "around", "delegating"])
@on_ranks(2)
def test_ddps_hook_counts_one_step_for_a_step(kind):
    """Training whose optimizer is given to the hook; its state may be saved after each step."""
    model = net()
    kinds = {"levels": levels([0]), "around": lookahead, "delegating": delegating}
    optimizer = kinds[kind](model.parameters())
    wrapped = ddp(model)
    state = grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)", optimizer=optimizer)
    for step in range(STEPS):
        usual(wrapped, optimizer, loss_of, step)
        assert state.state_dict()["step"] == state.context.updates == step + 1
    return digest(weights(model))


class Nested(torch.optim.SGD):
    """torch calls hooks of ``step()`` at both levels of such a subclass."""

    def step(self, closure=None):
        return super().step(closure)


@on_ranks(4)
def test_fsdps_hook_counts_a_step_that_calls_its_parents_step_once():
    """The weights and the counts of steps, with such a step and without, of replicas of shards."""
    found = []
    for make in (torch.optim.SGD, Nested):  # torch has added its hooks to SGD's step when the other class comes
        net = built(mesh_of()["shard"])
        optimizer = make(net.parameters(), lr=0.1)
        state = grace.torch.register_fsdp_hook(net, mesh_of()["replicate"], "topk(ratio=0.1)", optimizer=optimizer)
        for step in range(STEPS):
            usual(net, optimizer, loss_in_shards, step)
        found.append((digest(whole(net)), state.runner.context.step, state.runner.context.updates))
        state.close()
    plain, subclass = found
    assert subclass == plain
    assert plain[1] in (STEPS - 1, STEPS)


# -- pipelines --------------------------------------------------------------------------------------------------------


def in_a_pipeline(make):
    """Two stages of two replicas each; the losses and the weights of this rank's stage, and steps that were counted."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    loss = torch.nn.functional.mse_loss
    settings = {"microbatches": 2, "stages": 2, "compressor": "topk(ratio=0.1)"}
    engine = unmeasured(model, torch.zeros(8, 8), loss, optimizer=make, **settings)
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        losses.append(float(engine.step(torch.randn(8, 8, generator=draw), torch.randn(8, 4, generator=draw))))
    return losses, digest(dict(engine.parameters)), engine.gradients.updates


@on_ranks(4)
def test_a_pipeline_counts_one_step_for_a_step():
    plain = in_a_pipeline(lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9))
    assert in_a_pipeline(levels([0])) == plain
    assert plain[-1] == STEPS
