"""Communicators that the user calls: ``step``, ``send_step`` and ``receive_step``, over every engine."""

import subprocess

import numpy as np
import pytest
import torch

import grace
from grace.communicators.choice import build_communicator
from tests.support.engine_pools import DRAWN, command, environment
from tests.support.limits import HANGS
from tests.support.pools import launched, on_ranks
from tests.support.training import KINDS, Given, digest, distributed, made_up, means, refusal

pytestmark = pytest.mark.ranks

SHAPES = {"matrix": (40, 30), "kernel": (8, 5, 3, 3), "vector": (700,)}
STEPS = 3


def communicator(spec, memory=None, name=None):
    return build_communicator(spec, memory, name)


def together(spec):
    """The means of a few steps, all tensors in one bucket, and those that an optimizer gives."""
    grc, found = communicator(spec), []
    for step in range(STEPS):
        given = made_up(SHAPES, step, grace.rank())
        found.append(grc.step([torch.tensor(given[name]) for name in SHAPES], list(SHAPES)))
    model = Given(SHAPES)
    optimizer = distributed(model, spec, optimizer=lambda p: torch.optim.SGD(p, 0.0))
    return found, [list(step.values()) for step in means(model, optimizer, range(STEPS))]


@pytest.mark.parametrize("compressor", KINDS)
def test_steps_give_what_an_optimizer_does(two_ranks, compressor):
    for found, wanted in two_ranks.run(together, compressor):
        for mine, theirs in zip(found, wanted, strict=True):
            for got, expected in zip(mine, theirs, strict=True):
                if "powersgd" in compressor and got.ndim == 1:  # which an optimizer sends as it is
                    torch.testing.assert_close(got, expected)
                else:
                    assert torch.equal(got, expected)


def training(spec="topk(ratio=0.1)"):
    """GRACE's loop: every gradient by itself; then half the tensors by hand overlap, and the state goes round."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
    grace.broadcast_parameters(model)
    grc, optimizer = communicator(spec), torch.optim.SGD(model.parameters(), 0.1)

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
    step(2, grc)
    ended = digest(dict(model.named_parameters()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    other = communicator(spec)
    other.load_state_dict(saved)
    step(2, other)
    return ended, digest(dict(model.named_parameters())), saved["grace"]["step"]


@pytest.mark.parametrize("engine", ["gloo", *DRAWN])
def test_graces_loop_keeps_the_ranks_equal_and_goes_on_from_a_checkpoint(engine):
    (ended, again, steps), second = launched(engine, 2).run(training)
    assert (ended, again, steps) == second
    assert ended == again
    assert steps == 2 * 4


def overlapping():
    """Several under way at once, received in another order; over and over."""
    grc, alone = communicator("topk(ratio=0.2)"), communicator("topk(ratio=0.2)")
    seen = []
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
        seen += [torch.equal(got[name], alone.step(given[name], name)) for name in SHAPES]
    return seen


def test_sent_and_received_steps_give_what_steps_do(two_ranks):
    assert two_ranks.run(overlapping) == [[True] * 9] * 2


def refusals():
    """What each rank is told; in between, and at the end, steps go on."""
    grc, said = communicator("topk(ratio=0.5)"), []
    x = torch.tensor([4.0, 1.0])

    def refused(tensors, names, error=grace.ConfigError):
        with pytest.raises(error) as caught:
            grc.step(tensors, names)
        said.append(str(caught.value))

    rank = grace.rank()
    refused(torch.tensor([1, 2]) if rank else x, "w", grace.ConfigError if rank else grace.RankError)
    refused([1.0, 2.0] if rank else x, "w", grace.ConfigError if rank else grace.RankError)
    refused(torch.zeros(2 + rank), "w", grace.RankError)
    refused(x, "one" if rank else "other", grace.RankError)
    grc.step(x, "w")
    refused(torch.zeros(3), "w")
    refused([x, x], ["v", "v"])
    refused([x], ["v", "u"])
    refused([x, x.double()], ["v", "u"])
    refused([x, x], ["v", "w"])
    refused(np.float32([1]), "n")
    assert grc.step(x, "w").tolist() == [4, 0]
    return said


def test_what_cannot_be_exchanged_is_refused_on_all_ranks(two_ranks):
    first, second = two_ranks.run(refusals)
    assert "rank 1 refused to start: cannot exchange 'w': it is of dtype int64" in first[0]
    assert "cannot exchange 'w': it is of dtype int64" in second[0]
    assert "rank 1 refused to start: cannot exchange 'w': no kernels for builtins.list" in first.pop(1)
    assert "cannot exchange 'w': no kernels for builtins.list" in second.pop(1)
    for said in (first, second):
        assert "'w' float32[2], rank 1 has variable 'w' float32[3]" in said[1]
        new = "of a new communicator (allgather, topk(ratio=0.5), residual)"
        assert f"rank 0 'other' in step 0 {new}, and rank 1 'one' in step 0 {new}" in said[2]
        assert "'w' is float32[3] now, and was float32[2] at its first step" in said[3]
        assert "names must be strings, each another" in said[4]
        assert "there are 1 tensors and 2 names" in said[5]
        assert "'v' is float32 on cpu, 'u' is float64 on cpu" in said[6]
        assert "'w' was exchanged with other tensors before" in said[7]
        assert "it is of numpy" in said[8]


def states_that_do_not_fit():
    """What is said of states that cannot be loaded, of which one rank alone has some, and what is remembered then."""
    grc, other, said = communicator("topk(ratio=0.5)"), communicator("dgc(ratio=0.25)"), []
    grc.step(torch.tensor([4.0, 1.0, 2.0, 3.0]), "w")
    other.step(torch.tensor([4.0, 1.0, 2.0, 3.0]), "w")
    saved, before = grc.state_dict(), digest(grc.state_dict()["grace"]["state"])
    damaged = {**saved, "grace": {**saved["grace"], "step": 5}}
    shorter = {**saved, "tensors": [[["w", [3], "float32"]]]}
    for state in (other.state_dict(), damaged, {**saved, "tensors": 3}, shorter, {"of": "something else"}):
        for mine in (state, state if grace.rank() else saved):
            with pytest.raises((grace.ConfigError, grace.RankError)) as caught:
                grc.load_state_dict(mine)
            said.append(str(caught.value))
            assert digest(grc.state_dict()["grace"]["state"]) == before
    grc.load_state_dict(saved)
    return said, grc.step(torch.zeros(4), "w").tolist()


def test_a_state_that_is_refused_changes_nothing_on_any_rank(two_ranks):
    (first, brought), (second, same) = two_ranks.run(states_that_do_not_fit)
    assert brought == same == [0, 1, 2, 0]
    for words, place in (
        ("was saved with allgather, dgc(ratio=0.25), dgc", 0),
        ("its checksum differs", 2),
        ("does not say of which tensors it is", 4),
        ("'w' is float32[3] now, and was float32[4]", 6),
        ("pass the dict that its state_dict() returned", 8),
    ):
        assert all(words in told for told in (first[place], second[place], second[place + 1]))
        assert "rank 1" in first[place + 1]  # which alone was given it


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


def without_a_learning_rate():
    communicator("efsignsgd").step(torch.ones(300), "w")


def test_a_memory_that_needs_the_learning_rate_says_where_to_set_it(two_ranks):
    with pytest.raises(AssertionError, match="set its attribute lr"):
        two_ranks.run(without_a_learning_rate)


def after_a_shutdown():
    grc = communicator("topk(ratio=0.5)")
    first = [grc.step(torch.tensor(x), "w").tolist() for x in ([4.0, 1.0], [0.0, 1.0])]
    grace.shutdown()
    grace.init("local")
    second = [grc.step(torch.tensor(x), "w").tolist() for x in ([4.0, 1.0], [0.0, 1.0])]
    grace.shutdown()
    return first, second


def test_a_communicator_leaves_the_run_that_ends_and_starts_anew_in_another():
    grace.init("local")
    first, second = after_a_shutdown()
    assert first == second == [[4, 0], [0, 2]]


def test_who_forgets_init_in_a_launched_program_is_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torch, grace\ngrace.from_params({}).step(torch.ones(2), 'w')\n")
    done = subprocess.run(
        command("torchrun", 2, str(program)), env=environment(), capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode != 0
    assert "nobody called grace.init()" in done.stderr


def test_only_an_optimizer_delays_what_it_applies(two_ranks):
    with pytest.raises(AssertionError, match="only an optimizer can"):
        two_ranks.run(delayed)


def delayed():
    communicator("none", name="reduce_broadcast(staleness=1)").step(torch.ones(2), "w")


def out_of_order(kind):
    """What a rank is told whose second step is another one than that of rank 1; and what comes of going on alike."""
    grc, first = communicator("none"), grace.rank() == 0
    for name, n in (("a", 30), ("b", 30), ("c", 5)):
        grc.step(torch.ones(n), name)
    wrong = {"other order": ("ab", "ba"), "other size": ("ac", "ca"), "other name": ("a", "d"), "twice": ("aa", "ab")}
    said = ""
    try:
        for name in wrong[kind][0] if first else wrong[kind][1]:
            grc.step(torch.ones({"c": 5}.get(name, 30)), name)
    except grace.GraceError as error:
        said = f"{type(error).__name__}: {error}"
    return said, grc.step(torch.full((30,), 1.0 + grace.rank()), "b").tolist()


@pytest.mark.parametrize("engine", ["gloo", "mpirun-mpi"])
@pytest.mark.parametrize("kind", ["other order", "other size", "other name", "twice"])
def test_ranks_that_exchange_different_tensors_are_told_before_anything_is_exchanged(engine, kind):
    for said, after in launched(engine, 2).run(out_of_order, kind):
        assert said.startswith("RankError: ranks exchange different tensors by hand: rank 0 'a' in step "), said
        assert after == [1.5] * 30


def by_the_other_communicator():
    """What a rank is told that exchanges by another communicator than rank 1; and what comes of going on alike."""
    both = communicator("none"), communicator("topk(ratio=1.0)")
    for grc in both:
        grc.step(torch.ones(3), "a")
    said = ""
    try:
        both[grace.rank()].step(torch.ones(3), "a")
    except grace.GraceError as error:
        said = f"{type(error).__name__}: {error}"
    return said, [grc.step(torch.full((3,), 1.0 + grace.rank()), "a").tolist() for grc in both]


def test_ranks_that_exchange_by_different_communicators_are_told_instead_of_waiting(two_ranks):
    for said, after in two_ranks.run(by_the_other_communicator):
        assert said.startswith("RankError: ranks exchange different tensors by hand: rank 0 'a' in step 1 of "), said
        assert "(allreduce, none, none), and rank 1 'a' in step 1 of" in said, said
        assert after == [[1.5] * 3] * 2


def saved_in_a_step():
    grc = communicator("topk(ratio=0.5)")
    begun = grc.send_step(torch.ones(2), "w")
    said = refusal(grc.state_dict, kind=grace.ExchangeError)
    grc.receive_step(begun)
    return said


def test_a_state_that_is_saved_in_a_step_names_the_calls_that_end_it(two_ranks):
    for said in two_ranks.run(saved_in_a_step):
        assert said.endswith("Save and load after step() or receive_step()"), said
