"""torch.compile around what Grace exchanges: the same bits as without it, under the same names."""

import contextlib
import shutil

import pytest
import torch

import grace
from tests.support.drawing import THOROUGH
from tests.support.pools import on_ranks
from tests.support.training import batch, ddp, digest, distributed, loss_of, net, sgd, weights

STEPS = 3
NAMES = [name for name, _ in net().named_parameters()]


@contextlib.contextmanager
def settings(**changed):
    """Dynamo's settings in this context; what DDP's Python reducer changes besides is taken back."""
    import torch._dynamo as dynamo
    import torch._inductor.config as inductor

    dynamo.reset()
    rules, fused = dynamo.trace_rules, inductor._fuse_ddp_communication
    before = set(rules.LEGACY_MOD_INLINELIST)
    try:
        with dynamo.config.patch(**changed), inductor.patch(compile_threads=1):  # starts no processes that compile
            yield
    finally:
        inductor._fuse_ddp_communication = fused
        rules.LEGACY_MOD_INLINELIST.intersection_update(before)
        rules.get_legacy_mod_inlinelist.cache_clear()
        dynamo.reset()


def trained(forward, optimizer, step=None):
    """Weights after a few steps."""
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(forward, number).backward()
        (step or optimizer.step)()
    return weights(getattr(forward, "_orig_mod", forward))


def by_optimizer(backend=None, step_backend=None, method="topk(ratio=0.1)"):
    """With a compiled model, a compiled step, both or none; a digest of the weights."""
    model = net()
    forward = torch.compile(model, backend=backend) if backend else model
    optimizer = distributed(forward, method)
    step = torch.compile(optimizer.step, backend=step_backend) if step_backend else None
    ended = trained(forward, optimizer, step)
    assert list(optimizer.full_state_dict()["grace"]["pieces"]) == NAMES
    optimizer.close()
    return digest(ended)


def by_hook(where, backend="aot_eager", method="topk(ratio=0.1)"):
    """With a model compiled outside of DDP, or inside; likewise."""
    model = net()
    inner = torch.compile(model, backend=backend) if where == "inside" else model
    forward = ddp(inner)
    if where == "outside":
        forward = torch.compile(forward, backend=backend)
    state = grace.torch.register_ddp_hook(forward, method)
    trained(forward, sgd(model.parameters()))
    saved = state.full_state_dict()
    assert saved["step"] == STEPS
    assert list(saved["pieces"]) == NAMES
    state.close()
    return digest(weights(model))


WAYS = {
    "optimizer, model and step": (by_optimizer, ("eager", "aot_eager"), {}),
    "hook, DDP inside": (by_hook, ("outside",), {}),
}
"""Compiled autograd and the Python reducer are in test_compiled_backward.py."""
if THOROUGH:
    WAYS["optimizer, model"] = by_optimizer, ("aot_eager",), {}
    WAYS["hook, DDP outside"] = by_hook, ("inside",), {}
    WAYS["hook, not split"] = by_hook, ("outside",), {"optimize_ddp": False}


@pytest.mark.parametrize("method", ["topk(ratio=0.1)", "powersgd(rank=2)"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks()
def test_compiled_is_uncompiled_bit_for_bit(way, method):
    function, args, changed = WAYS[way]
    with settings(**changed):
        ended = function(*args, method=method)
    assert ended == by_optimizer(method=method)
    return ended


@on_ranks(2, engine="horovodrun-gloo")
def test_horovods_optimizer_trains_a_compiled_model_by_a_compiled_step_alike():
    with settings():
        ended = by_optimizer("eager", "eager")
    assert ended == by_optimizer()
    return ended


@pytest.mark.parametrize("engine", ["gloo", *(["horovodrun-gloo"] if THOROUGH else [])])
@on_ranks(2)
def test_a_whole_step_may_be_compiled_with_clipping_and_an_exchange_that_is_dropped(engine):
    found = []
    for backend in (None, "aot_eager"):
        with settings():
            model = net()
            optimizer = distributed(model, "topk(ratio=0.1)")

            def step(images, labels, drops, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                if drops:
                    torch.nn.functional.cross_entropy(model(-images), labels).backward()
                    optimizer.synchronize()
                    optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()

            run = torch.compile(step, backend=backend) if backend else step
            for number in range(STEPS):
                run(*batch(number), number == 1)
            optimizer.close()
            found.append(digest(weights(model)))
    assert found[0] == found[1]
    return found


@on_ranks(2)
def test_a_step_of_the_python_reducer_ends_where_the_optimizer_makes_one():
    """Two parts of a model that take turns, one gradient a step, under the Python reducer: as many steps are counted as
    are made."""
    with settings(optimize_ddp="python_reducer"):
        model = ddp(torch.nn.ModuleList([torch.nn.Linear(8, 1, bias=False) for _ in range(2)]))
        optimizer = sgd(model.parameters())
        state = grace.torch.register_ddp_hook(model, "topk(ratio=0.5)")
        for step in range(4):
            optimizer.zero_grad()
            model.module[step % 2](torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert state.full_state_dict()["step"] == 4


@pytest.mark.skipif(not THOROUGH, reason="left to `make thorough`: a C++ compiler runs for each graph of each rank")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
@on_ranks()
def test_compiled_to_machine_code_differs_by_rounding():
    """Sums are rounded in another order than in the uncompiled run."""
    small = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))  # noqa: E731
    found = []
    with settings():
        for compiled in (False, True):
            model = net(make=small)
            forward = torch.compile(model) if compiled else model
            optimizer = distributed(forward, "qsgd(levels=127)", memory="residual")
            found.append(trained(forward, optimizer))
    first, second = found
    assert max(float((value - second[name]).abs().max()) for name, value in first.items()) < 1e-4
    return digest(second)
