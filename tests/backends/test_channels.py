"""Every optimizer's exchanges travel over a channel of their own, beside other optimizers' and users' collectives."""

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import grace
from tests.support.engine_pools import DRAWN
from tests.support.limits import HANGS
from tests.support.pools import on_ranks
from tests.support.training import Given, distributed

pytestmark = pytest.mark.ranks

SHAPES = {"first": (6,), "middle": (6,), "last": (6,)}


def gradients(step, rank, number):
    """Return gradients of every variable but one that only one rank leaves out: another one for each optimizer."""
    left_out = {0: "last", 1: "first"}.get(number) if rank == 1 - number else None
    return {
        name: torch.full(shape, float(1 + step + 10 * rank + 100 * number + 1000 * i))
        for i, (name, shape) in enumerate(SHAPES.items())
        if name != left_out
    }


def backward(model, given):
    sum((p * given[name]).sum() for name, p in model.named_parameters() if name in given).backward()


def check(model, step, number, ranks):
    everyone = [gradients(step, rank, number) for rank in ranks]
    for name, p in model.named_parameters():
        mean = sum(given[name] for given in everyone if name in given) / len(everyone)
        assert torch.equal(p.grad, mean), (step, number, name)


def summed(value):
    """The user's own sum of a metric over all ranks, over what the program has for it."""
    engine = grace.init().name
    if engine == "torch":
        tensor = torch.tensor([value] * 8)  # as long as a variable's wire
        dist.all_reduce(tensor)
        return tensor[0].item()
    if engine == "horovod":
        import horovod.torch as hvd

        return hvd.allreduce(torch.tensor([value]), op=hvd.Sum, name="metric").item()
    import numpy as np
    from mpi4py import MPI

    total = np.zeros(8, np.float32)
    MPI.COMM_WORLD.Allreduce(np.full(8, value, np.float32), total)
    return float(total[0])


@pytest.mark.parametrize("engine", ["gloo", *DRAWN])
@on_ranks()
def test_two_optimizers_a_metric_and_a_layer_that_one_rank_leaves_out(engine):
    """A GAN's two optimizers: one rank begins the exchanges of one in backward, where the other rank has to wait for
    a layer that it leaves out until step()."""
    models = [Given(SHAPES), Given(SHAPES)]
    optimizers = [distributed(model, group_bytes=24) for model in models]
    everyone = range(grace.size())
    for step in range(3):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            backward(model, gradients(step, grace.rank(), number))
        assert summed(float(grace.rank() + 1)) == sum(rank + 1 for rank in everyone)
        for number in (1, 0):
            optimizers[number].synchronize()
            assert summed(2.0) == 2 * len(everyone)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            check(model, step, number, everyone)
            optimizer.step()


@on_ranks()
def test_a_channel_serves_one_optimizer_after_the_other():
    """Two of three optimizers are dropped, and one is closed."""
    channels, found = grace.init().channels, []
    for step in range(3):
        model = Given(SHAPES)
        optimizer = distributed(model)
        backward(model, gradients(step, grace.rank(), 2))
        optimizer.step()
        if step == 1:
            optimizer._grace.runner.close()
        del optimizer, model
        gc.collect()
        found.append(len(channels.made))
    assert len(set(found)) == 1
    return found


def ended_at_different_moments():
    """On one rank the first optimizer ends before the second is made, on the other one after that; the third ends
    with an exchange under way on one rank."""
    channels, alive = grace.init().channels, []
    before = len(channels.made)
    for step in range(4):
        model = Given(SHAPES)
        optimizer = distributed(model, group_bytes=24)
        backward(model, gradients(step, grace.rank(), 2 if step < 2 else 0))
        if step != 2:
            optimizer.synchronize()
            everyone = [gradients(step, rank, 2 if step < 2 else 0) for rank in range(grace.size())]
            for name, p in model.named_parameters():
                assert torch.equal(p.grad, sum(g[name] for g in everyone if name in g) / len(everyone))
        if step == 0 and grace.rank() == 0:
            alive.append(optimizer)
        else:
            optimizer._grace.runner.close()
    return len(channels.made) - before


def test_what_is_free_on_one_rank_only_is_not_taken(two_ranks):
    two_ranks.stop()  # their channels are counted from none on
    assert two_ranks.run(ended_at_different_moments) == [3, 3]
    two_ranks.stop()


@on_ranks(3)
def test_an_optimizer_of_some_ranks_leaves_the_others_alone():
    """Two optimizers of the ranks 0 and 2, which know other numbers of groups, while rank 1 does nothing."""
    group, _ = dist.new_group([0, 2]), dist.new_group([0, 1])
    if grace.rank() == 1:
        return
    for strategy in (None, {"reduce_broadcast": 1}):
        models = [Given(SHAPES), Given(SHAPES)]
        for number, model in enumerate(models):
            chosen = {} if strategy is None else {"communicator": "reduce_broadcast(staleness=1)"}
            optimizer = distributed(model, group_bytes=24, process_group=group, **chosen)
            backward(model, gradients(0, grace.rank(), number))
            optimizer.synchronize()
            if strategy is None:
                check(model, 0, number, [0, 2])
            optimizer._grace.runner.pending_means()
            optimizer._grace.runner.close()
            gc.collect()


ENDING = """
import sys
import torch
import torch.distributed as dist
from tests.support.training import distributed, loss_of, net
import grace

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
models = [net(), net()]
optimizers = [distributed(models[0]), distributed(models[1], communicator="reduce_broadcast(staleness=1)")]
for step in range(2):
    for model, optimizer in zip(models, optimizers):
        loss_of(model, step).backward()
        optimizer.step()
optimizers[1].state_dict()  # waits for what is on its way
dist.destroy_process_group()
print("the end")
"""


def test_channels_end_with_the_users_process_group(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-c", ENDING]
    with contextlib.ExitStack() as stack:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        ranks = [
            stack.enter_context(subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes))
            for rank in range(2)
        ]
        for process in ranks:
            out, err = process.communicate(timeout=HANGS)
            assert (process.returncode, out, err) == (0, "the end\n", "")
