"""Gradients that are thrown away do not come back by way of a memory: GANs, batches that are left out, closures.

The usual GAN loop does not freeze the discriminator while the generator trains: the generator's loss fills the
discriminator's gradients too, and its ``zero_grad()`` drops them before its own turn.
"""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import grace
from tests.support.pairwise import pairwise
from tests.support.pools import on_ranks
from tests.support.sharded import mesh_of
from tests.support.training import Given, ddp, digest

TOPK, BLOCK = "topk(ratio=0.1)", "block(bits=4)"
KINDS = ("none", TOPK, "qsgd(levels=7)", "powersgd(rank=1)", "efsignsgd")
OWN = 1e-7
"""Factor of a discriminator's own gradients: it hardly moves, unless the others' come back."""


def batch():
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1 + grace.rank()))


def linear():
    model = torch.nn.Linear(20, 6, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


WAYS = {"optimizer": 2, "hook": 2, "replicas": 4, "shards": 4, "both": 4}
"""Number of ranks where gradients are exchanged by a distributed optimizer, by DDP's hook, or under FSDP2 by
methods that compress what replicas exchange, what shards do, or both."""


def shard(model, way):
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)) if way == "shards" else mesh_of()["shard"])


def compress(model, way, optimizer=None, replicas=TOPK, shards=BLOCK):
    """Compress what a sharded model exchanges; the state that is told of its steps."""
    state = None if way == "replicas" else grace.torch.compress_reduce_scatter(model, shards)
    if way != "shards":
        state = grace.torch.register_fsdp_hook(model, mesh_of()["replicate"], replicas, optimizer=optimizer)
    return state


def made(way, given=True, **options):
    """A model, the module that is called, its optimizer, and who has the state that is closed in the end.

    Args:
        way: one of ``WAYS``.
        given: whether hooks are told the optimizer.
        options: of the distributed optimizer, or of DDP's hook.
    """
    model = linear()
    if WAYS[way] == 4:
        shard(model, way)
    forward, optimizer = model, sgd(model)
    told = optimizer if given else None
    if way == "optimizer":
        state = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=TOPK, **options)
    elif way == "hook":
        forward = ddp(model)
        state = grace.torch.register_ddp_hook(forward, TOPK, optimizer=told, **options)
    else:
        state = compress(model, way, told)
    return model, forward, optimizer, state


def whole(p):
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()


def moved(model):
    return float(whole(model.weight).abs().max())


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


def hooked(method, given, view, to_none):
    """Return the discriminator's way under DDP's hook, and the warnings."""
    model = linear()
    optimizer = sgd(model)
    wrapped = ddp(model, gradient_as_bucket_view=view)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grace.torch.register_ddp_hook(wrapped, method, optimizer=optimizer if given or method == "efsignsgd" else None)
        alternated(wrapped, optimizer, lambda: wrapped.zero_grad(set_to_none=to_none))
    return moved(model), [str(one.message) for one in caught if "cleared" in str(one.message)]


@on_ranks(2)
def test_a_discriminator_under_ddps_hook_does_not_learn_to_be_fooled():
    flags = [(True, False)] * 3
    cases = pairwise(KINDS, *flags, allowed=lambda method, given, view, to_none: given or (to_none and not view))
    answers = {case: hooked(*case) for case in cases}
    assert {way: found for way, found in answers.items() if found[0] > 1e-4} == {}
    assert not any(said for _, said in answers.values())


@on_ranks(2)
def test_nor_after_a_step_that_raised():
    model, forward, optimizer, state = made("hook")
    x = batch()
    for _ in range(10):
        optimizer.zero_grad()
        (forward(x) * OWN).sum().backward()
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        forward(x).sum().backward()
    optimizer.zero_grad()
    state.close()
    assert moved(model) < 1e-4


@pytest.mark.every
@pytest.mark.parametrize("way", ["replicas", "shards", "both"])
@on_ranks(4)
def test_nor_under_fsdps_hooks(way):
    for given in (True, False):
        model, forward, optimizer, state = made(way, given)
        alternated(forward, optimizer, model.zero_grad)
        state.close()
        assert moved(model) < 1e-4, given


@on_ranks()
def test_nor_under_ddps_python_reducer():
    import torch._dynamo as dynamo
    import torch._inductor.config as inductor

    before = set(dynamo.trace_rules.LEGACY_MOD_INLINELIST), inductor._fuse_ddp_communication
    try:
        with dynamo.config.patch(optimize_ddp="python_reducer"):
            for to_none in (True, False):
                assert hooked(TOPK, True, False, to_none)[0] < 1e-4
    finally:
        inductor._fuse_ddp_communication = before[1]
        dynamo.trace_rules.LEGACY_MOD_INLINELIST.intersection_update(before[0])
        dynamo.trace_rules.get_legacy_mod_inlinelist.cache_clear()


@pytest.mark.parametrize("how", ["optimizer.zero_grad", "model.zero_grad"])
@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
@on_ranks(2)
def test_nor_where_the_others_optimizer_is_synchronized_and_cleared(engine, how):
    """The exchange of distributed optimizers is awaited, and its means are cleared."""
    found = {}
    for method in KINDS:
        model = linear()
        optimizer = grace.DistributedOptimizer(sgd(model), model.named_parameters(), compressor=method)
        clear = model.zero_grad if how == "model.zero_grad" else optimizer.zero_grad
        alternated(model, optimizer, clear, optimizer.synchronize)
        found[method] = moved(model)
        optimizer.close()
    assert {method: far for method, far in found.items() if far > 1e-4} == {}


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
@on_ranks(2)
def test_nor_what_a_rank_remembers_that_had_no_gradient(engine):
    """Rank 1's memory is as it was after means to which it gave no gradient were cleared."""
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
    assert torch.equal(after, before)
    assert before.abs().max() > 1


class Both(torch.nn.Module):
    """A generator and a discriminator in one module, under one DistributedDataParallel."""

    def __init__(self):
        super().__init__()
        self.made, self.judged = linear(), torch.nn.Linear(6, 4, bias=False)
        torch.nn.init.ones_(self.judged.weight)

    def forward(self, x, whole):
        made = self.made(x)
        return self.judged(made if whole else made.detach() + 1)


@on_ranks(2)
def test_two_optimizers_over_parts_of_one_module():
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
    assert (model.judged.weight.detach() - start).abs().max() < 1e-4
    assert moved(model.made) > 0.1


@pytest.mark.parametrize("how", ["accumulated", "saved", "by hand", "closure"])
@on_ranks()
def test_what_is_used_stays_in_memories(how):
    """Accumulated passes, a state that was asked for meanwhile, an update by hand, and each evaluation of a closure."""
    model, x = linear(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=1.0) if how == "closure" else sgd(model)
    wrapped = ddp(model)
    state = grace.torch.register_ddp_hook(wrapped, TOPK, optimizer=None if how == "by hand" else optimizer)
    wrapped(x).sum().backward()
    if how == "accumulated":  # without no_sync(): each pass is exchanged, and adds to what is there
        wrapped(x).sum().backward()
        optimizer.step()
    elif how == "saved":  # saving is refused, and reading the counts decides nothing
        which = r"has used the gradient of 'weight', of shape \(6, 20\)\. Save and load after optimizer\.step"
        with pytest.raises(grace.ExchangeError, match=which):
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
    assert float(sum(value.abs().sum() for value in kept.values())) > 0.1


@pytest.mark.every
@pytest.mark.parametrize("method", [TOPK, "threshold(value=100.5)"])  # of which nothing is sent at first: zeros
@pytest.mark.parametrize("view", [False, True])
@on_ranks()
def test_accumulated_passes_that_are_exchanged_each_lose_nothing(method, view):
    """Two passes arrive whole with them and with tiny ones behind them, which are exchanged in each step."""
    model = Given({"w": (100,)})
    wrapped, optimizer = ddp(model, gradient_as_bucket_view=view), torch.optim.SGD(model.parameters(), lr=1.0)
    grace.torch.register_ddp_hook(wrapped, method, optimizer=optimizer)
    first, second = torch.arange(1.0, 101.0), torch.arange(1.0, 101.0).flip(0)
    for step in range(-2, 16):  # DDP makes its buckets anew after the first one
        optimizer.zero_grad()
        for own in (first, second):
            wrapped({"w": own if step == 0 else torch.full((100,), 1e-6)}).backward()
        optimizer.step()
    assert float((model.w.detach() + first + second).abs().max()) < 1e-2


def check_accumulated_in_shards(model, way, method, passes):
    """Weights are what two passes, exchanged in one step, and many tiny ones behind them have brought."""
    shard(model, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = compress(model, way, optimizer, replicas=method, shards=method)
    start = whole(model.weight).clone()
    for step in range(12):
        optimizer.zero_grad()
        for inputs, coefficients in passes:
            (model(inputs) * (coefficients if step == 1 else 1e-6)).sum().backward()
        optimizer.step()
    state.close()
    plain = torch.nn.Parameter(torch.zeros_like(start))
    forward = torch.nn.functional.embedding if way == "shards" else torch.nn.functional.linear
    for inputs, coefficients in passes:
        (forward(inputs, plain) * coefficients).sum().backward()
    torch.distributed.all_reduce(plain.grad)
    assert float((whole(model.weight) - start + plain.grad / 4).abs().max()) < 1e-3


@on_ranks(4)
def test_nor_do_those_of_sharded_models_where_all_is_below_a_threshold():
    """The first pass sends nothing: the mean is zeros."""
    up = torch.arange(1.0, 51.0)
    passes = [(given[None], torch.ones(2)) for given in (up, up.flip(0))]
    check_accumulated_in_shards(torch.nn.Linear(50, 2, bias=False), "replicas", "threshold(value=50.5)", passes)


@on_ranks(4)
def test_nor_do_those_of_rows_of_one_shard():
    """The other shards' parts of the gradient are zeros."""
    draw = torch.Generator().manual_seed(grace.rank())
    passes = [(torch.arange(2), torch.randn(2, 32, generator=draw)) for _ in range(2)]
    check_accumulated_in_shards(torch.nn.Embedding(8, 32), "shards", BLOCK, passes)


@pytest.mark.every
@pytest.mark.parametrize(("way", "size"), WAYS.items())
@on_ranks()
def test_a_batch_that_is_left_out_for_its_norm_leaves_no_trace(way, size):
    """A loop that leaves out batches whose gradients are too large, as large language models' do: after clipping has
    told the norm, all ranks clear the gradients instead of stepping. The last weights are those of a loop that was
    never given such a batch."""
    found = []
    for spiked in (True, False):
        model, forward, optimizer, state = made(way)
        for step in range(8):
            for scale in (1000.0, 1.0) if spiked and step == 3 else (1.0,):
                optimizer.zero_grad()
                (forward(batch()) * scale).sum().backward()
                if way == "optimizer":
                    optimizer.synchronize()
                if float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)) < 1000:
                    optimizer.step()
        found.append(digest(whole(model.weight)))
        state.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("way", ["hook", "optimizer"])
@on_ranks()
def test_a_step_that_a_scaler_left_out_is_as_if_it_had_not_been(way):
    """The loss scale halves where a step overflowed; what memories keep goes on as without that step."""
    found = []
    for overflows in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        model, forward, optimizer, state = made(way, grad_scaler=scaler)
        for step in range(6):
            for scale in (float("inf"), 1.0) if overflows and step == 2 else (1.0,):
                optimizer.zero_grad()
                scaler.scale((forward(batch()) * scale).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        optimizer.zero_grad()
        saved = state.full_state_dict()
        ranks = saved["grace"]["ranks"] if way == "optimizer" else saved["ranks"]
        kept = sum(value.abs().sum() for one in ranks for value in one["memory"].values())
        found.append((model.weight.detach(), kept))
    (one, kept), (other, wanted) = found
    assert float((one - other).abs().max()) < 1e-5
    assert float(kept) == pytest.approx(float(wanted) / 2, rel=1e-4)


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
@on_ranks()
def test_an_exchange_that_begins_in_synchronize_takes_nothing_from_those_before(engine):
    assert begun_late(True) == begun_late(False)


@on_ranks(2)
def test_where_nobody_tells_what_becomes_of_gradients_it_is_said_once():
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
    said = [str(one.message) for one in caught if "cleared" in str(one.message)]
    assert kept > 10
    assert len(said) == 1
    assert "register_ddp_hook(..., optimizer=optimizer)" in said[0]
