"""Gradients that are thrown away do not come back by way of a memory: GANs, batches that are left out, closures.

The usual GAN loop does not freeze the discriminator while the generator trains: the generator's loss fills the
discriminator's gradients too, and its ``zero_grad()`` drops them before its own turn.
"""

import warnings

import pytest
import torch

import grace
from tests.support.pools import launched
from tests.support.training import ddp, digest

pytestmark = pytest.mark.ranks

TOPK = "topk(ratio=0.1)"
KINDS = ("none", TOPK, "qsgd(levels=7)", "powersgd(rank=1)", "efsignsgd")
OWN = 1e-7
"""What a discriminator's own gradients are multiplied by: it hardly moves, unless the others' come back."""


def batch():
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1 + grace.rank()))


def linear():
    model = torch.nn.Linear(20, 5, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def moved(model):
    return float(model.weight.detach().abs().max())


def alternated(forward, optimizer, clear, between=lambda: None):
    """Ten turns of a discriminator's own loss, each followed by the generator's, whose gradients are cleared."""
    x = batch()
    for _ in range(10):
        clear()
        (forward(x) * OWN).sum().backward()
        optimizer.step()
        forward(x).sum().backward()
        between()
    clear()


def hooked(method, given, view, to_none, python_reducer=False):
    """How far the discriminator moved under DDP's hook, and what was warned of."""
    model = linear()
    optimizer = sgd(model)
    wrapped = ddp(model, gradient_as_bucket_view=view)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grace.torch.register_ddp_hook(wrapped, method, optimizer=optimizer if given or method == "efsignsgd" else None)
        alternated(wrapped, optimizer, lambda: wrapped.zero_grad(set_to_none=to_none))
    return moved(model), [str(one.message) for one in caught if "cleared" in str(one.message)]


def all_hooked():
    ways = [(True, False, True), (False, False, True), (True, False, False), (True, True, True), (True, True, False)]
    return {(method, *way): hooked(method, *way) for method in KINDS for way in ways}


def test_a_discriminator_under_ddps_hook_does_not_learn_to_be_fooled(two_ranks):
    for answers in two_ranks.run(all_hooked):
        assert {way: found for way, found in answers.items() if found[0] > 1e-4} == {}
        assert not any(said for _, said in answers.values())


def python_reducer():
    import torch._dynamo as dynamo
    import torch._inductor.config as inductor

    before = set(dynamo.trace_rules.LEGACY_MOD_INLINELIST), inductor._fuse_ddp_communication
    try:
        with dynamo.config.patch(optimize_ddp="python_reducer"):
            return [hooked(TOPK, True, False, to_none)[0] for to_none in (True, False)]
    finally:
        inductor._fuse_ddp_communication = before[1]
        dynamo.trace_rules.LEGACY_MOD_INLINELIST.intersection_update(before[0])
        dynamo.trace_rules.get_legacy_mod_inlinelist.cache_clear()


def test_nor_under_ddps_python_reducer(two_ranks):
    for found in two_ranks.run(python_reducer):
        assert max(found) < 1e-4


def advised(how):
    """The same with distributed optimizers: the exchange is awaited, and its means are cleared."""
    found = {}
    for method in KINDS:
        model = linear()
        optimizer = grace.DistributedOptimizer(sgd(model), model.named_parameters(), compressor=method)
        clear = model.zero_grad if how == "model.zero_grad" else optimizer.zero_grad
        alternated(model, optimizer, clear, optimizer.synchronize)
        found[method] = moved(model)
        optimizer.close()
    return found


@pytest.mark.parametrize("how", ["optimizer.zero_grad", "model.zero_grad"])
@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
def test_nor_where_the_others_optimizer_is_synchronized_and_cleared(engine, how):
    for found in launched(engine, 2).run(advised, how):
        assert {method: far for method, far in found.items() if far > 1e-4} == {}


def lone():
    """How far rank 1's memory is, after means to which it gave no gradient were cleared, from what it was before."""
    model = linear()
    optimizer = grace.DistributedOptimizer(sgd(model), model.named_parameters(), compressor=TOPK)
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.full_state_dict()["grace"]["ranks"][1]["memory"]["weight"]
    if grace.rank() == 0:  # rank 1 begins the exchange in synchronize()
        model(batch()).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    after = optimizer.full_state_dict()["grace"]["ranks"][1]["memory"]["weight"]
    optimizer.close()
    return float((after - before).abs().max()), float(before.abs().max())


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
def test_nor_what_a_rank_remembers_that_had_no_gradient(engine):
    for apart, kept in launched(engine, 2).run(lone):
        assert apart == 0
        assert kept > 1


class Both(torch.nn.Module):
    """A generator and a discriminator in one module, under one DistributedDataParallel."""

    def __init__(self):
        super().__init__()
        self.made, self.judged = linear(), torch.nn.Linear(5, 4, bias=False)
        torch.nn.init.ones_(self.judged.weight)

    def forward(self, x, whole):
        made = self.made(x)
        return self.judged(made if whole else made.detach() + 1)


def one_module():
    """Two optimizers over parts of it: a step of one leaves the other's gradients to be thrown away."""
    model = Both()
    wrapped = ddp(model, find_unused_parameters=True)
    state = grace.torch.register_ddp_hook(wrapped, TOPK)
    made, judged, x = sgd(model.made), sgd(model.judged), batch()
    start = model.judged.weight.detach().clone()
    for turn in range(10):
        judged.zero_grad()
        (wrapped(x, False) * OWN).sum().backward()
        judged.step()
        made.zero_grad()
        wrapped(x, turn % 2 == 0 or grace.rank() == 0).sum().backward()  # rank 1 does not always use the generator
        made.step()
    judged.zero_grad()
    (wrapped(x, False) * OWN).sum().backward()
    judged.step()  # the generator's gradient, which its step has used, is there still
    assert state.full_state_dict()["step"] == 21
    return float((model.judged.weight.detach() - start).abs().max()), moved(model.made)


def test_two_optimizers_over_parts_of_one_module(two_ranks):
    for judged, made in two_ranks.run(one_module):
        assert judged < 1e-4
        assert made > 0.1


def kept_after(how):
    """How much memories keep of gradients that were used."""
    model, x = linear(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=1.0) if how == "closure" else sgd(model)
    wrapped = ddp(model)
    state = grace.torch.register_ddp_hook(wrapped, TOPK, optimizer=None if how == "by hand" else optimizer)
    wrapped(x).sum().backward()
    if how == "accumulated":  # without no_sync(): each pass is exchanged, and adds to what is there
        wrapped(x).sum().backward()
        optimizer.step()
    elif how == "saved":  # saving is refused, and reading the counts decides nothing
        with pytest.raises(grace.ExchangeError, match=r"after optimizer\.step"):
            state.state_dict()
        assert state.traffic.sent_bytes > 0
        optimizer.step()
    elif how == "by hand":
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad
    elif how == "closure":

        def evaluate():
            model.zero_grad()
            loss = wrapped(x).square().mean()
            loss.backward()
            return loss

        optimizer.zero_grad()
        model.weight.data.normal_(generator=torch.Generator().manual_seed(3))
        optimizer.step(evaluate)
    kept = state.full_state_dict()["state"]["memory"]
    return float(sum(value.abs().sum() for value in kept.values()))


def test_what_is_used_stays_in_memories(two_ranks):
    """Accumulated passes, a state that was asked for meanwhile, an update by hand, and each evaluation of a closure."""
    for how in ("accumulated", "saved", "by hand", "closure"):
        for kept in two_ranks.run(kept_after, how):
            assert kept > 0.1, how


def accumulating(method, view):
    """The sums of what arrived in p.grad of two passes and of tiny ones behind them, both exchanged in each step."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(100))
    model.forward = lambda given: (model.w * given).sum()
    wrapped, optimizer = ddp(model, gradient_as_bucket_view=view), torch.optim.SGD([model.w], lr=1.0)
    grace.torch.register_ddp_hook(wrapped, method, optimizer=optimizer)
    first, second = torch.arange(1.0, 101.0), torch.arange(1.0, 101.0).flip(0)
    for step in range(-2, 16):  # DDP makes its buckets anew after the first one
        optimizer.zero_grad()
        for own in (first, second):
            wrapped(own if step == 0 else torch.full((100,), 1e-6)).backward()
        optimizer.step()
    return float((model.w.detach() + first + second).abs().max())


def test_accumulated_passes_that_are_exchanged_each_lose_nothing(two_ranks):
    for method in (TOPK, "threshold(value=100.5)"):  # of which nothing is sent at first: the mean is zeros
        for view in (False, True):
            assert max(two_ranks.run(accumulating, method, view)) < 1e-2, (method, view)


def spikes(how):
    """A loop that leaves out batches whose gradients are too large, as large language models' do: after clipping has
    told the norm, all ranks clear the gradients instead of stepping. How far the last weights are from those that were
    never given such a batch."""
    found = []
    for spiked in (True, False):
        model, x = linear(), batch()
        optimizer, forward = sgd(model), model
        if how == "hook":
            forward = ddp(model)
            grace.torch.register_ddp_hook(forward, TOPK, optimizer=optimizer)
        else:
            optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=TOPK)
        for step in range(8):
            for scale in (1000.0, 1.0) if spiked and step == 3 else (1.0,):
                optimizer.zero_grad()
                (forward(x) * scale).sum().backward()
                if how == "optimizer":
                    optimizer.synchronize()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                if norm < 100:
                    optimizer.step()
        found.append(digest(model.weight.detach()))
        if how == "optimizer":
            optimizer.close()
    return found


def test_a_batch_that_is_left_out_for_its_norm_leaves_no_trace(two_ranks):
    for how in ("hook", "optimizer"):
        for with_spike, without in two_ranks.run(spikes, how):
            assert with_spike == without, how


def skipped_by_a_scaler(how):
    """The loss scale halves where a step overflowed; what memories keep goes on as without that step."""
    found = []
    for overflows in (True, False):
        model, x = linear(), batch()
        optimizer, forward = sgd(model), model
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        if how == "hook":
            forward = ddp(model)
            state = grace.torch.register_ddp_hook(forward, TOPK, optimizer=optimizer, grad_scaler=scaler)
        else:
            optimizer = grace.DistributedOptimizer(
                optimizer, model.named_parameters(), compressor=TOPK, grad_scaler=scaler
            )
        for step in range(6):
            for scale in (float("inf"), 1.0) if overflows and step == 2 else (1.0,):
                optimizer.zero_grad()
                scaler.scale((forward(x) * scale).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        optimizer.zero_grad()
        saved = state.full_state_dict() if how == "hook" else optimizer.full_state_dict()["grace"]
        kept = sum(value.abs().sum() for one in saved["ranks"] for value in one["memory"].values())
        found.append((model.weight.detach(), kept))
    (one, kept), (other, wanted) = found
    return float((one - other).abs().max()), float(kept), float(wanted) / 2


def test_a_step_that_a_scaler_left_out_is_as_if_it_had_not_been(two_ranks):
    for how in ("hook", "optimizer"):
        for apart, kept, wanted in two_ranks.run(skipped_by_a_scaler, how):
            assert apart < 1e-5, how
            assert kept == pytest.approx(wanted, rel=1e-4), how


def begun_late(lacks):
    """Memories after a step that overflowed, and two in which rank 1 has zeros for the first layer, or no gradient:
    then its exchange begins when the program waits, and that of the last layer has begun before."""
    model = torch.nn.ModuleList([linear(), linear()])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = grace.DistributedOptimizer(
        plain, model.named_parameters(), compressor=TOPK, grad_scaler=scaler, bucket_bytes=1, group_bytes=1
    )
    for step in range(4):
        optimizer.zero_grad()
        x = (batch() + step) * (float("inf") if step == 1 else 1.0)
        loss = model[1](x).sum()
        if step < 2 or grace.rank() == 0:
            loss = loss + model[0](x).sum()
        elif not lacks:
            loss = loss + model[0](0 * x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = digest(optimizer.state_dict()["grace"]["state"])
    optimizer.close()
    return found


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
def test_an_exchange_that_begins_in_synchronize_takes_nothing_from_those_before(engine):
    assert launched(engine, 2).run(begun_late, True) == launched(engine, 2).run(begun_late, False)


def unknown():
    """A program that updates by ``.data``: nobody tells the hook what becomes of gradients, which are used."""
    model, x = linear(), batch()
    wrapped = ddp(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = grace.torch.register_ddp_hook(wrapped, TOPK)
        for _ in range(4):
            model.zero_grad()
            wrapped(x).sum().backward()
            model.weight.data -= 0.1 * model.weight.grad
        kept = state.full_state_dict()["state"]["memory"]["weight"].abs().sum()
    return float(kept), [str(one.message) for one in caught if "cleared" in str(one.message)]


def test_where_nobody_tells_what_becomes_of_gradients_it_is_said_once(two_ranks):
    for kept, said in two_ranks.run(unknown):
        assert kept > 10
        assert len(said) == 1
        assert "register_ddp_hook(..., optimizer=optimizer)" in said[0]
