"""A rank that is killed in the middle of training ends every other rank with an error that names what was under way."""

import contextlib
import multiprocessing as mp
import os
import re
import signal
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import grace
from tests.support.drawing import THOROUGH
from tests.support.limits import HANGS
from tests.support.training import ddp, distributed, loss_of, net, sgd

pytestmark = pytest.mark.ranks

SIZE, VICTIM, KILLED_AT = 3, 1, 5
SECONDS = 30


def member(pipe, rank, store, compressor, kind):
    """Train until something ends it; say each step, then how it ended."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=SECONDS)
    )
    grace.init()
    model = net()
    if kind == "optimizer":
        forward, optimizer = model, distributed(model, compressor)
    else:
        forward, optimizer = ddp(model), sgd(model.parameters())
        grace.torch.register_ddp_hook(forward, compressor, optimizer=optimizer)
    try:
        for step in range(10**9):
            pipe.send(step)
            optimizer.zero_grad()
            loss_of(forward, step).backward()
            optimizer.step()
    except BaseException as error:
        names = [cls.__name__ for cls in type(error).__mro__]
        pipe.send((names, "".join(traceback.format_exception_only(error)), grace.rank()))
    with contextlib.suppress(Exception):
        grace.shutdown()


@pytest.fixture
def run(tmp_path):
    """Start the ranks, kill one of them after a few steps, and hand back how the others ended."""
    processes = []

    def run(compressor, kind):
        context = mp.get_context("spawn")
        pipes = []
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=member, args=(there, rank, f"{tmp_path}/store", compressor, kind))
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        while receive(pipes[VICTIM], HANGS) < KILLED_AT:
            pass
        os.kill(processes[VICTIM].pid, signal.SIGKILL)
        endings = []
        for rank in range(SIZE):
            if rank != VICTIM:
                ending = 0
                while isinstance(ending, int):
                    ending = receive(pipes[rank], HANGS)
                endings.append(ending)
        for process in processes:
            process.join(HANGS)
        return endings, [process.exitcode for process in processes]

    yield run
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def receive(pipe, seconds):
    assert pipe.poll(seconds), f"nothing heard for {seconds} s"
    return pipe.recv()


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)", *(["powersgd(rank=2)"] if THOROUGH else [])])
@pytest.mark.parametrize("kind", ["optimizer", "hook"])
def test_a_killed_rank_ends_the_others_with_the_variables_that_were_under_way(run, kind, compressor):
    endings, exit_codes = run(compressor, kind)
    assert exit_codes[VICTIM] == -signal.SIGKILL
    assert None not in exit_codes  # nobody hangs, nobody is left behind
    for names, message, _ in endings:
        if kind == "optimizer":  # a bucket's first and last variable, or its only one
            assert "ExchangeError" in names
            assert " .. head." in message or "(scale; " in message
            assert f"of {SIZE}: the exchange of bucket" in message
        else:  # the first variable
            assert re.search(r"the exchange of bucket \d+ \((scale|conv|hidden|head)", message), message
        assert f"; rank {VICTIM} was lost (killed, or its machine is gone)" in message  # first; others may follow
        assert "The engine says: " in message
