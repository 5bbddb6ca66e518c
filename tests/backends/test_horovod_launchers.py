"""Over every launcher of Horovod: without compression Grace is Horovod to the bit. On some of the ranks: process sets.
Start values and optimizer state come from one rank, on every engine."""

import pytest
import torch

import grace
from tests.support.pools import launched
from tests.support.training import OPTIMIZERS, copied, digest, distributed, loss_of, net, same, state_of, train, weights

pytestmark = pytest.mark.ranks


def trained(how, optimizer, scale):
    """Ten steps; ``how`` is Horovod's own compression, or a method of Grace's."""
    import horovod.torch as hvd

    model = net()
    made = OPTIMIZERS[optimizer](model.parameters(), lr=0.05 / scale if optimizer == "sgd" else 0.01)
    if how.startswith("hvd."):
        compression = {"hvd.none": hvd.Compression.none, "hvd.fp16": hvd.Compression.fp16}[how]
        made = hvd.DistributedOptimizer(made, model.named_parameters(), compression=compression)
    else:
        made = grace.DistributedOptimizer(made, model.named_parameters(), how)
    for step in range(10):
        made.zero_grad()
        (scale * loss_of(model, step)).backward()
        made.step()
    return weights(model)


def all_trained():
    """Per optimizer and method, digests of what Horovod and Grace end with."""
    answers = {}
    for optimizer in OPTIMIZERS:
        # scaled so that float16 holds the sums in full precision: Horovod halves them in it, Grace in float32
        for method, scale in (("none", 1.0), ("fp16", 4096.0)):
            ways = (f"hvd.{method}", method)
            answers[optimizer, method] = [digest(trained(how, optimizer, scale)) for how in ways]
    return answers


def test_without_compression_and_with_fp16_it_is_horovod_to_the_bit(horovod_engine):
    first, second = launched(horovod_engine, 2).run(all_trained)
    assert first == second
    for case, (plain, ours) in first.items():
        assert plain == ours, case


# -- three ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three():
    """3 ranks under horovodrun, which may add process sets."""
    pool = launched("horovodrun-gloo", 3)
    pool.stop()  # one that may not
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        yield pool


def test_on_three_ranks_it_is_horovod_to_rounding(three):
    # the order in which a ring sums depends on what Horovod fuses
    ours, plain = three.run(trained, "none", "sgd", 1.0), three.run(trained, "hvd.none", "sgd", 1.0)
    assert len({digest(answer) for answer in ours}) == 1
    for name, value in plain[0].items():
        torch.testing.assert_close(ours[0][name], value, rtol=1e-5, atol=1e-6, msg=name)


def in_a_set(ranks, method, groups):
    """The members of a process set train together, two optimizers at a time; the other rank is on its own."""
    import horovod.torch as hvd

    members = hvd.add_process_set(ranks)
    models = [net(seed=grace.rank()), net(seed=10 + grace.rank())]
    with pytest.raises(grace.ConfigError, match=r"a process_group .* or a process_set .*, not both"):
        distributed(models[0], method, process_set=members, process_group=object())
    optimizers = [distributed(model, method, process_set=members, groups=groups) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        for optimizer in optimizers:
            with optimizer.no_sync():
                pass
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
    optimizers[0].load_state_dict(optimizers[0].full_state_dict(), memory="keep")
    assert optimizers[1].metrics()["bytes_sent"] == optimizers[1].traffic.sent_bytes
    assert optimizers[1].strategy is None is optimizers[1].plan
    optimizers[1].use_strategy("uniform(compressor=qsgd)")
    with optimizers[1].anchor():
        optimizers[1].flush()
    with pytest.raises(grace.ConfigError, match=r"Horovod's join\(\) is for all ranks"):
        optimizers[1].join()
    remembered = ["grace" in optimizer.state_dict() for optimizer in optimizers]
    answer = [digest(weights(model)) for model in models]
    hvd.broadcast_optimizer_state(optimizers[0], 0)  # among all ranks, as Horovod's
    hvd.remove_process_set(members)
    return answer, remembered


def alone():
    """Return hashes of the weights of a rank that trains by itself."""
    answers = []
    for seed in (grace.rank(), 10 + grace.rank()):
        model = net(seed)
        train(model, OPTIMIZERS["sgd"](model.parameters()), range(3))
        answers.append(digest(weights(model)))
    return answers


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("method", ["topk(ratio=0.1)", "powersgd(rank=2)"])
def test_the_ranks_of_a_process_set_train_together(three, method, ranks, groups):
    answers = three.run(in_a_set, ranks, method, groups)
    (outsider,) = {0, 1, 2} - set(ranks)
    assert answers[ranks[0]] == answers[ranks[1]]
    assert answers[ranks[0]][1] == [True, True]
    assert answers[outsider] == (three.run(alone)[outsider], [False, False])


# -- state from one rank --------------------------------------------------------------------------------------------


def spread(optimizer, fresh):
    """Every rank has its own optimizer state and memories; the others' may be that of an optimizer at its start."""
    model = net()
    made = distributed(model, "topk(ratio=0.1)", optimizer=OPTIMIZERS[optimizer])
    train(model, made, range(3))
    if fresh:
        own = made if grace.rank() == 0 else OPTIMIZERS[optimizer](model.parameters())
        made.load_state_dict({**own.state_dict(), "grace": made.state_dict()["grace"]})
        assert bool(made.state) == (grace.rank() == 0)
    for state in made.state.values():
        for value in state.values():
            value.add_(grace.rank())
    made.param_groups[0]["lr"] = 0.5 + grace.rank()
    before, remembered = copied(dict(enumerate(made.state.values()))), state_of(made)
    grace.broadcast_optimizer_state(made)
    after = copied(dict(enumerate(made.state.values())))
    assert same(state_of(made), remembered)
    for p in model.parameters():
        p.data.add_(grace.rank())
    grace.broadcast_parameters(model)
    train(model, made, range(3, 5))
    return digest(before), digest(after), digest(remembered), made.param_groups[0]["lr"], digest(weights(model))


@pytest.mark.parametrize("fresh", [False, True], ids=["other state", "no state"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("engine", "size"), [("gloo", 2), ("horovodrun-gloo", 3), ("mpirun-mpi", 3)])
def test_optimizer_state_comes_from_one_rank_and_memories_stay(engine, size, optimizer, fresh):
    before, after, remembered, lrs, trained_on = zip(*launched(engine, size).run(spread, optimizer, fresh), strict=True)
    assert before[1] != before[0]
    assert set(after) == {before[0]}
    assert len(set(remembered)) == size
    assert set(lrs) == {0.5}
    assert len(set(trained_on)) == 1
