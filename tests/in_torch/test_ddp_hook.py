"""The DDP hook is the same exchange as DistributedOptimizer, with its state under the parameters' names."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _set_pg_timeout

import grace
from grace.errors import PayloadError
from tests.support.drawing import THOROUGH
from tests.support.frameworks import check_refused
from tests.support.pools import on_ranks
from tests.support.training import (
    METHODS,
    Branches,
    Given,
    copied,
    ddp,
    digest,
    distributed,
    gradients,
    loss_of,
    made_up,
    net,
    plain_sgd,
    refusal,
    sgd,
    train,
    train_given,
    weights,
)

SOME = ("none", "topk(ratio=0.1)", "powersgd(rank=2)")
"""Methods: one that sums, one that gathers, and one of several rounds."""
CUTS = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": 0.001},
    "one of DDP's buckets in many": {"bucket_bytes": 100},
}


def both_ways(compressor, steps, bucket_cap_mb=25, bucket_bytes=None):
    """Weights after the same training through the optimizer and through the hook, and both states."""
    ours, hooked = net(), net()
    optimizer = distributed(ours, compressor)
    train(ours, optimizer, range(steps))

    wrapped = ddp(hooked, bucket_cap_mb=bucket_cap_mb)
    plain = sgd(hooked.parameters())
    state = grace.torch.register_ddp_hook(wrapped, compressor, optimizer=plain, bucket_bytes=bucket_bytes)
    train(wrapped, plain, range(steps))
    assert bucket_bytes is None or all(len(buckets) > 1 for buckets in state.plans.values())
    saved = state.state_dict()
    other = optimizer.state_dict()["grace"]
    assert saved["step"] == other["step"] == steps
    assert state.traffic.payload_bytes == optimizer.traffic.payload_bytes
    return weights(ours), weights(hooked), other["state"], saved["state"]


@pytest.mark.every
@pytest.mark.parametrize("cut", CUTS)
@on_ranks()
def test_hook_and_optimizer_train_alike_bit_for_bit_on_two_ranks(cut):
    found = {}
    for method in METHODS if cut == "one bucket" or THOROUGH else SOME:
        ours, hooked, state, hook_state = both_ways(method, 3, **CUTS[cut])
        assert digest(hooked) == digest(ours), method
        assert digest(hook_state) == digest(state), method
        found[method] = digest(hooked)
    return found


@on_ranks(3)
def test_hook_and_optimizer_train_alike_to_rounding_on_three_ranks():
    found = {}
    for method in METHODS if THOROUGH else (*SOME, "bf16", "qsgd"):
        rounding = {"fp16": 2.0**-10, "bf16": 2.0**-7}.get(method, 1e-4)
        ours, hooked, *_ = both_ways(method, 3)
        for name, value in ours.items():
            wanted = f"{method}: {name}"
            torch.testing.assert_close(hooked[name], value, rtol=rounding, atol=rounding / 10, msg=wanted)
        found[method] = digest(hooked)
    return found


@on_ranks(2)
def test_the_hook_without_compression_is_ddp_bit_for_bit_on_two_ranks():
    models = [net(), net()]
    for model, hook in zip(models, (False, True), strict=True):
        wrapped, optimizer = ddp(model), sgd(model.parameters())
        if hook:
            grace.torch.register_ddp_hook(wrapped, "none")
        train(wrapped, optimizer, range(6))
    plain, hooked = [digest(weights(model)) for model in models]
    assert hooked == plain


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)"])
@on_ranks(2)
def test_no_sync_accumulates_under_the_hook(compressor):
    """Two micro-batches, the first under no_sync, against their sum in one backward."""
    models = [net(), net()]
    for model, at_once in zip(models, (True, False), strict=True):
        wrapped, optimizer = ddp(model), sgd(model.parameters())
        state = grace.torch.register_ddp_hook(wrapped, compressor)
        for step in (0, 2, 4):
            optimizer.zero_grad()
            if at_once:
                (loss_of(wrapped.module, step) + loss_of(wrapped, step + 1)).backward()
            else:
                with wrapped.no_sync():
                    loss_of(wrapped, step).backward()
                loss_of(wrapped, step + 1).backward()
            optimizer.step()
        assert state.traffic.steps == 3
    at_once, in_parts = [weights(model) for model in models]
    for name, value in at_once.items():
        torch.testing.assert_close(in_parts[name], value, rtol=1e-4, atol=1e-6, msg=name)


@on_ranks(2)
def test_unused_parameters_under_the_hook():
    found = {}
    for compressor in METHODS:
        model = net(make=lambda: Branches(0))
        wrapped = ddp(model, find_unused_parameters=True)
        optimizer = sgd(model.parameters())
        state = grace.torch.register_ddp_hook(wrapped, compressor, optimizer=optimizer)
        generator = torch.Generator().manual_seed(grace.rank())
        for _ in range(4):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        assert state.state_dict()["step"] == 4
        found[compressor] = all(torch.isfinite(p).all() for p in model.parameters()), digest(weights(model))
    assert all(finite for finite, _ in found.values())
    return found


@on_ranks(2)
def test_a_memory_that_follows_the_learning_rate_asks_for_the_optimizer():
    def exchange():
        wrapped = ddp(net())
        grace.torch.register_ddp_hook(wrapped, "efsignsgd")
        loss_of(wrapped, 0).backward()

    message = refusal(exchange)
    assert "register_ddp_hook(model, ..., optimizer=optimizer)" in message


@on_ranks(2)
def test_an_optimizer_without_a_parameter_is_refused_before_the_first_step():
    """On one rank: the other one hears of it."""
    model = net()
    name = list(dict(model.named_parameters()))[2]
    left_out = name if grace.rank() == 1 else ""
    optimizer = sgd([p for own, p in model.named_parameters() if own != left_out])
    wrapped = ddp(model)
    with pytest.raises(grace.errors.GraceError) as caught:
        grace.torch.register_ddp_hook(wrapped, "efsignsgd", optimizer=optimizer)
    assert f"does not hold the parameter {name!r}" in str(caught.value)
    grace.torch.register_ddp_hook(wrapped, "efsignsgd", optimizer=sgd(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@on_ranks(2)
def test_gradients_keep_their_dtype_under_the_hook(dtype):
    model = net().to(dtype)
    wrapped = ddp(model)
    state = grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(grace.rank())
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 1, 8, 8, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
    residuals = state.state_dict()["state"]["memory"]
    assert residuals
    assert all(value.dtype == torch.float32 for value in residuals.values())
    assert all(p.grad.dtype == dtype and p.grad.abs().sum() > 0 for p in model.parameters())
    return digest(gradients(model))


def one_late(folder):
    """Return the error of a rank whose partner begins its backward only after the error."""
    model, done = ddp(net()), Path(folder, "done")
    state = grace.torch.register_ddp_hook(model, "topk(ratio=0.1)")
    if grace.rank() == 1:
        while not done.exists():
            time.sleep(0.01)
        return None
    exchanges = state.runner.channel
    exchanges.timeout = 0.5  # all that the ranks do together before may take its time
    _set_pg_timeout(timedelta(seconds=exchanges.timeout), exchanges.group)
    said = refusal(lambda: loss_of(model, 0).backward(), kind=RuntimeError)
    done.touch()
    return said


def test_a_rank_that_waits_in_the_hook_does_not_count_itself_among_the_absent(two_ranks, tmp_path):
    said, _ = two_ranks.run(one_late, str(tmp_path))
    two_ranks.stop()  # what is left of the exchange is in their process groups
    assert "rank 1 is at test_ddp_hook.py" in said
    assert "The engine says: no answer from the other ranks within 0.5 s" in said  # not in gloo's own words
    assert "rank 0 is" not in said, said


@on_ranks(2)
def test_sparse_gradients_are_refused_before_training_unless_ddp_ignores_them():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2))
    said = refusal(grace.torch.register_ddp_hook, ddp(model), "topk")
    assert "the gradient of '0.weight' is sparse, and DDP's hook exchanges dense gradients alone" in said
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    grace.torch.register_ddp_hook(ddp(model), "topk")


@on_ranks(2)
def test_parameters_that_ddp_ignores_are_not_exchanged():
    """They may even have other shapes on other ranks."""
    model = net()
    model.extra = torch.nn.Module()
    model.extra.own = torch.nn.Parameter(torch.ones(2 + grace.rank()))
    ignored = {"extra.own", "conv.bias"}
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = ddp(model)
    optimizer = sgd(model.parameters())
    state = grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)", optimizer=optimizer)
    train(wrapped, optimizer, range(2))
    assert not ignored & state.traffic.payload_bytes.keys()
    trained = weights(model)
    assert bool(trained.pop("extra.own").eq(1).all())
    alone = [torch.empty_like(trained["conv.bias"]) for _ in range(2)]
    torch.distributed.all_gather(alone, trained.pop("conv.bias"))
    assert not torch.equal(*alone)
    return digest(trained)


SHAPES = {"matrix": (20, 30), "vector": (7,)}


def resumed_without_delay(hook, first_step, **options):
    """Return the weights of a run that resumes one with delayed means, and delays none: by the hook, or by the
    optimizer. Its first step is used, thrown away, or overflows on rank 1."""
    delayed, model = Given(SHAPES), Given(SHAPES)
    optimizer = distributed(
        delayed, "topk(ratio=0.1)", optimizer=plain_sgd, communicator="reduce_broadcast(staleness=2)"
    )
    train_given(delayed, optimizer, range(3))
    saved = copied(optimizer.full_state_dict())
    model.load_state_dict(delayed.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=first_step == "overflows")
    choices = {"compressor": "topk(ratio=0.1)", "communicator": "reduce_broadcast", "grad_scaler": scaler}
    plain = plain_sgd(model.parameters())
    if hook:
        wrapped = ddp(model, **options)
        state = grace.torch.register_ddp_hook(wrapped, optimizer=plain, **choices)
        state.load_state_dict(saved["grace"])
    else:
        wrapped = model
        plain = grace.DistributedOptimizer(plain, model.named_parameters(), **choices)
        plain.load_state_dict(saved)
    for step in range(3, 6):
        plain.zero_grad()
        loss = wrapped(made_up(SHAPES, step, grace.rank()))
        overflows = first_step == "overflows" and step == 3 and grace.rank() == 1
        scaler.scale(loss * torch.inf if overflows else loss).backward()
        if not (first_step == "is thrown away" and step == 3):
            scaler.step(plain)
        scaler.update()
    runner = state.runner if hook else plain._grace.runner
    if hook:
        state.close_step()
    assert not runner.has_carried_over
    return weights(model)


@pytest.mark.parametrize("first_step", ["is used", "is thrown away", "overflows"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_ranks()
def test_the_hook_applies_means_that_a_delayed_run_left(first_step, view):
    wanted = resumed_without_delay(False, first_step)
    found = resumed_without_delay(True, first_step, gradient_as_bucket_view=view)
    assert digest(found) == digest(wanted)
    return digest(found)


@on_ranks()
def test_a_step_whose_payloads_prove_damaged_when_it_is_closed_leaves_no_residual():
    """Headers on a GPU are read only then."""
    model = net()
    wrapped = ddp(model)
    plain = sgd(model.parameters())
    state = grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)", optimizer=plain)
    train(wrapped, plain, range(2))

    def refuse(trips):
        raise PayloadError("topk: rank 1 could not decode a payload")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grace.torch.ddp, "resolve_headers", refuse)
        with pytest.raises(PayloadError):
            state.close_step()
    memories = {id(shard.communicator.memory): shard.communicator.memory for shard in state.runner.shards.values()}
    assert not any(memory.state.changed(*state.runner.shards) for memory in memories.values())
    train(wrapped, plain, range(2, 3))
    assert state.state_dict()["step"] == 2  # the refused step does not count


@on_ranks()
def test_the_hook_keeps_means_of_parameters_that_no_rank_uses():
    """DDP ignores a bucket's values of parameters that no rank used."""
    model = Given(SHAPES)
    wrapped = ddp(model, find_unused_parameters=True)
    plain = plain_sgd(wrapped.parameters(), lr=1.0)
    state = grace.torch.register_ddp_hook(wrapped, "none", optimizer=plain)
    state.runner.carry_over({name: torch.ones(shape) for name, shape in SHAPES.items()})
    found = []
    for used in (["matrix"], ["matrix", "vector"], ["matrix", "vector"]):
        plain.zero_grad(set_to_none=False)
        wrapped({name: torch.zeros(SHAPES[name]) for name in used}).backward()
        plain.step()
        found.append([-p.flatten()[0].item() for p in model.parameters()])
    assert found == [[1, 0], [1, 1], [1, 1]]


@on_ranks(2)
def test_a_second_hook_and_parameters_frozen_at_the_wrong_time_are_refused_by_name():
    """On all ranks, before anything is exchanged; parameters may be frozen once the hook is registered."""

    def frozen_since():
        model = net()
        wrapped = ddp(model, find_unused_parameters=True)
        model.conv.requires_grad_(False)
        grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)")

    def unfrozen_since():
        model = net()
        model.conv.requires_grad_(False)
        wrapped = ddp(model)
        model.conv.requires_grad_(True)
        grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)")

    def unfrozen_in_training():
        model = net()
        model.conv.requires_grad_(False)
        wrapped = ddp(model)
        grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)")
        train(wrapped, plain_sgd(model.parameters()), range(1))
        model.conv.requires_grad_(True)
        loss_of(wrapped, 1).backward()

    def twice():
        wrapped = ddp(net())
        grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)")
        grace.torch.register_ddp_hook(wrapped, "qsgd")

    def beside_anothers():
        wrapped = ddp(net())
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        grace.torch.register_ddp_hook(wrapped, "qsgd")

    def leaves_out_buckets():
        wrapped = ddp(net(), find_unused_parameters=True)
        wrapped.skip_all_reduce_unused_params = True  # an argument of newer versions of torch
        grace.torch.register_ddp_hook(wrapped, "qsgd")

    check_refused(
        {
            leaves_out_buckets: ["skip_all_reduce_unused_params=True", "Leave the argument out"],
            frozen_since: ["exchanges 7 parameters, and 5 of the model", "freeze parameters after register_ddp_hook"],
            unfrozen_since: ["exchanges 5 parameters, and 7 of the model"],
            unfrozen_in_training: ["'conv.weight' requires gradients now", "drift apart", "wrap the model anew"],
            twice: ["the model has Grace's hook already"],
            beside_anothers: ["the model has the hook fp16_compress_hook already"],
        }
    )
    model = net()
    wrapped = ddp(model, find_unused_parameters=True)
    grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)")
    optimizer = plain_sgd(model.parameters())
    for steps, trained in ((range(1), True), (range(1, 3), False), (range(3, 4), True)):
        model.conv.requires_grad_(trained)
        train(wrapped, optimizer, steps)
    return digest(weights(model))
