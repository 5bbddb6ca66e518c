"""Communicators that the user calls: ``step``, ``send_step`` and ``receive_step``, over every engine."""

import subprocess

import numpy as np
import pytest
import torch

import grace
from grace.communicators.choice import build_communicator
from tests.support.engine_pools import DRAWN, command, environment
from tests.support.limits import HANGS
from tests.support.pools import on_ranks
from tests.support.training import KINDS, Given, digest, distributed, made_up, means, refusal

pytestmark = pytest.mark.ranks

SHAPES = {"matrix": (40, 30), "kernel": (8, 5, 3, 3), "vector": (700,)}
STEPS = 3


def communicator(spec, memory=None, name=None):
    return build_communicator(spec, memory, name)


@pytest.mark.parametrize("compressor", KINDS)
@on_ranks()
def test_steps_give_what_an_optimizer_does(compressor):
    """The means of a few steps, all tensors in one bucket."""
    grc, model = communicator(compressor), Given(SHAPES)
    optimizer = distributed(model, compressor, optimizer=lambda p: torch.optim.SGD(p, 0.0))
    for step, wanted in enumerate(means(model, optimizer, range(STEPS))):
        given = made_up(SHAPES, step, grace.rank())
        found = grc.step([torch.tensor(given[name]) for name in SHAPES], list(SHAPES))
        for got, expected in zip(found, wanted.values(), strict=True):
            if "powersgd" in compressor and got.ndim == 1:  # which an optimizer sends as it is
                torch.testing.assert_close(got, expected)
            else:
                assert torch.equal(got, expected)


@pytest.mark.parametrize("engine", ["gloo", *DRAWN])
@on_ranks()
def test_graces_loop_keeps_the_ranks_equal_and_goes_on_from_a_checkpoint(engine):
    """Every gradient by itself; the state goes round."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
    grace.broadcast_parameters(model)
    grc, optimizer = communicator("topk(ratio=0.1)"), torch.optim.SGD(model.parameters(), 0.1)

    def step(number, grc):
        torch.manual_seed(10 * number + grace.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        for name, p in model.named_parameters():
            p.grad = grc.step(p.grad, name)
        optimizer.step()

    for number in range(2):
        step(number, grc)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    saved = grc.state_dict(everyone=True)
    assert saved["grace"]["step"] == 2 * 4
    step(2, grc)
    ended = digest(dict(model.named_parameters()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    other = communicator("topk(ratio=0.1)")
    other.load_state_dict(saved)
    step(2, other)
    assert digest(dict(model.named_parameters())) == ended
    return ended


@on_ranks()
def test_sent_and_received_steps_give_what_steps_do():
    """Several under way at once, received in another order; over and over."""
    grc, alone = communicator("topk(ratio=0.2)"), communicator("topk(ratio=0.2)")
    for step in range(STEPS):
        given = {name: torch.tensor(value) for name, value in made_up(SHAPES, step, grace.rank()).items()}
        begun = {name: grc.send_step(given[name], name) for name in SHAPES}
        with pytest.raises(grace.ConfigError, match="'vector' is under way already"):
            grc.send_step(given["vector"], "vector")
        with pytest.raises(grace.ExchangeError, match="the exchange of a step is under way"):
            grc.state_dict()
        got = {name: grc.receive_step(begun[name]) for name in reversed(SHAPES)}
        with pytest.raises(grace.ConfigError, match="what send_step\\(\\) of the same run"):
            grc.receive_step(begun["vector"])
        assert all(torch.equal(got[name], alone.step(given[name], name)) for name in SHAPES)


@on_ranks()
def test_what_cannot_be_exchanged_is_refused_on_all_ranks():
    """Steps go on between refusals, and at the end."""
    grc, x, rank = communicator("topk(ratio=0.5)"), torch.tensor([4.0, 1.0]), grace.rank()
    own = grace.ConfigError if rank else grace.RankError
    told = "" if rank else "rank 1 refused to start: "
    new = "of a new communicator (allgather, topk(ratio=0.5), residual)"
    one, other = f"rank 0 'other' in step 0 {new}", f"rank 1 'one' in step 0 {new}"
    for tensors, names, kind, words in (
        (torch.tensor([1, 2]) if rank else x, "w", own, f"{told}cannot exchange 'w': it is of dtype int64"),
        ([1.0, 2.0] if rank else x, "w", own, f"{told}cannot exchange 'w': no kernels for builtins.list"),
        (torch.zeros(2 + rank), "w", grace.RankError, "'w' float32[2], rank 1 has variable 'w' float32[3]"),
        (x, "one" if rank else "other", grace.RankError, f"{one}, and {other}"),
    ):
        assert words in refusal(grc.step, tensors, names, kind=kind)
    grc.step(x, "w")
    for tensors, names, words in (
        (torch.zeros(3), "w", "'w' is float32[3] now, and was float32[2] at its first step"),
        ([x, x], ["v", "v"], "names must be strings that differ"),
        ([x], ["v", "u"], "there are 1 tensors and 2 names"),
        ([x, x.double()], ["v", "u"], "'v' is float32 on cpu, 'u' is float64 on cpu"),
        ([x, x], ["v", "w"], "'w' was exchanged with other tensors before"),
        (np.float32([1]), "n", "it is of numpy"),
    ):
        assert words in refusal(grc.step, tensors, names)
    assert grc.step(x, "w").tolist() == [4, 0]


@on_ranks()
def test_a_state_that_is_refused_changes_nothing_on_any_rank():
    """States that cannot be loaded are given to both ranks, and to rank 1 alone."""
    grc, other = communicator("topk(ratio=0.5)"), communicator("dgc(ratio=0.25)")
    grc.step(torch.tensor([4.0, 1.0, 2.0, 3.0]), "w")
    other.step(torch.tensor([4.0, 1.0, 2.0, 3.0]), "w")
    saved, before = grc.state_dict(), digest(grc.state_dict()["grace"]["state"])
    damaged = {**saved, "grace": {**saved["grace"], "step": 5}}
    shorter = {**saved, "tensors": [[["w", [3], "float32"]]]}
    for state, words in (
        (other.state_dict(), "was saved with allgather, dgc(ratio=0.25), dgc"),
        (damaged, "its checksum differs"),
        ({**saved, "tensors": 3}, "does not say of which tensors it is"),
        (shorter, "'w' is float32[3] now, and was float32[4]"),
        ({"of": "something else"}, "pass the dict that its state_dict() returned"),
    ):
        for mine in (state, state if grace.rank() else saved):
            said = refusal(grc.load_state_dict, mine, kind=(grace.ConfigError, grace.RankError))
            assert words in said if mine is state else "rank 1" in said
            assert digest(grc.state_dict()["grace"]["state"]) == before
    grc.load_state_dict(saved)
    assert grc.step(torch.zeros(4), "w").tolist() == [0, 1, 2, 0]


@on_ranks()
def test_a_step_counts_the_elements_and_bytes_of_its_own_tensors():
    """Also after tensors were added, and taken back because a state was refused; two tensors that are under way
    together are one step."""
    grc, other, x = communicator("none"), communicator("topk(ratio=0.1)"), torch.ones(100)
    for name in ("one", "two"):
        grc.step(x, name)
    other.step(torch.ones(300), "more")
    message = refusal(grc.load_state_dict, other.state_dict(everyone=True))
    assert "the checkpoint was saved with" in message
    grc.step(x, "one")
    traffic = grc._by_hand.runner.traffic
    begun = [grc.send_step(x, name) for name in ("one", "two")]
    for each in begun:
        grc.receive_step(each)
    assert (traffic.steps, traffic.elements) == (4, 500)
    assert traffic.dense_bytes == 4 * traffic.elements  # of float32, by a ring of two ranks
    assert traffic.bits_per_element > 32  # and the headers


@on_ranks()
def test_a_memory_that_needs_the_learning_rate_says_where_to_set_it():
    assert "set its attribute lr" in refusal(communicator("efsignsgd").step, torch.ones(300), "w")


def test_a_communicator_leaves_the_run_that_ends_and_starts_anew_in_another():
    grc = communicator("topk(ratio=0.5)")
    for _ in range(2):
        grace.init("local")
        assert [grc.step(torch.tensor(x), "w").tolist() for x in ([4.0, 1.0], [0.0, 1.0])] == [[4, 0], [0, 2]]
        grace.shutdown()


def test_who_forgets_init_in_a_launched_program_is_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torch, grace\ngrace.from_params({}).step(torch.ones(2), 'w')\n")
    done = subprocess.run(
        command("torchrun", 2, str(program)), env=environment(), capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode != 0
    assert "nobody called grace.init()" in done.stderr


@on_ranks()
def test_only_an_optimizer_delays_what_it_applies():
    delayed = communicator("none", name="reduce_broadcast(staleness=1)")
    assert "only an optimizer can" in refusal(delayed.step, torch.ones(2), "w")


WRONG = {"other order": ("ab", "ba"), "other size": ("ac", "ca"), "other name": ("a", "d"), "twice": ("aa", "ab")}
"""Tensors of ranks 0 and 1."""


@pytest.mark.parametrize("engine", ["gloo", "mpirun-mpi"])
@pytest.mark.parametrize("kind", WRONG)
@on_ranks()
def test_ranks_that_exchange_different_tensors_are_told_before_anything_is_exchanged(engine, kind):
    """Then they go on alike."""
    grc = communicator("none")
    for name, n in (("a", 30), ("b", 30), ("c", 5)):
        grc.step(torch.ones(n), name)

    def steps():
        for name in WRONG[kind][grace.rank()]:
            grc.step(torch.ones({"c": 5}.get(name, 30)), name)

    said = refusal(steps, kind=grace.RankError)
    assert said.startswith("ranks exchange different tensors by hand: rank 0 'a' in step "), said
    assert grc.step(torch.full((30,), 1.0 + grace.rank()), "b").tolist() == [1.5] * 30


@on_ranks()
def test_ranks_that_exchange_by_different_communicators_are_told_instead_of_waiting():
    """Then they go on alike."""
    both = communicator("none"), communicator("topk(ratio=1.0)")
    for grc in both:
        grc.step(torch.ones(3), "a")
    said = refusal(both[grace.rank()].step, torch.ones(3), "a", kind=grace.RankError)
    assert said.startswith("ranks exchange different tensors by hand: rank 0 'a' in step 1 of "), said
    assert "(allreduce, none, none), and rank 1 'a' in step 1 of" in said, said
    for grc in both:
        assert grc.step(torch.full((3,), 1.0 + grace.rank()), "a").tolist() == [1.5] * 3


@on_ranks()
def test_a_state_that_is_saved_in_a_step_names_the_calls_that_end_it():
    grc = communicator("topk(ratio=0.5)")
    begun = grc.send_step(torch.ones(2), "w")
    said = refusal(grc.state_dict, kind=grace.ExchangeError)
    assert said.endswith("Save and load after step() or receive_step()"), said
    grc.receive_step(begun)
