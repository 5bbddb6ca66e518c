"""Horovod's operations with ``grace`` in place of ``hvd``, on every engine: values, gradients, and what is refused."""

import sys

import pytest
import torch

import grace
from tests.support.pools import launched, on_ranks
from tests.support.training import digest, net, refusal, train, weights

pytestmark = pytest.mark.ranks

ENGINES = [("gloo", 2), ("gloo", 3), ("horovodrun-gloo", 2), ("mpirun-mpi", 2)]
EVERYWHERE = pytest.mark.parametrize(("engine", "size"), ENGINES, ids=[f"{engine}-{size}" for engine, size in ENGINES])
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def of(rank, shape, dtype):
    """A rank's numbers, which every dtype holds."""
    count = max(1, torch.Size(shape).numel())
    return (torch.arange(count) % 5 + rank + 1)[: torch.Size(shape).numel()].reshape(shape).to(dtype)


@EVERYWHERE
@on_ranks()
def test_reduced_tensors_are_those_that_torch_computes_from_all_ranks(engine, size):
    """Averages and sums of all dtypes and shapes."""
    rank = grace.rank()
    for dtype in FLOATS + WHOLE:
        for shape in ((), (0,), (3,), (2, 3)):
            mine, all_of_them = of(rank, shape, dtype), torch.stack([of(r, shape, dtype) for r in range(size)])
            total = all_of_them.double().sum(0)
            mean = total / size if dtype in FLOATS else total.div(size, rounding_mode="floor")
            for options, wanted in (
                ({}, mean),
                ({"average": False}, total),
                ({"op": grace.Sum, "name": "sum"}, total),
                ({"op": grace.Average}, mean),
                ({"op": grace.Sum, "prescale_factor": 2.0, "postscale_factor": 3.0}, total * 6),
            ):
                got = grace.allreduce(mine, **options)
                assert (got.dtype, got.shape) == (dtype, torch.Size(shape))
                torch.testing.assert_close(got, wanted.to(dtype), msg=f"{dtype} {shape} {options}")
            assert mine.equal(of(rank, shape, dtype))
    turned = of(rank, (2, 3), torch.float32).t()
    assert grace.allreduce(turned, op=grace.Sum).equal(sum(of(r, (2, 3), torch.float32).t() for r in range(size)))
    return digest(grace.allreduce(torch.rand(1000, generator=torch.Generator().manual_seed(rank))))


@EVERYWHERE
@on_ranks()
def test_rows_broadcasts_and_objects_arrive(engine, size):
    """Rows of unequal counts, broadcasts of any dtype, and objects."""
    rank = grace.rank()
    for dtype in (*FLOATS, *WHOLE, torch.bool, torch.complex64):
        rows = [of(r, (r, 2), torch.float32).to(dtype) for r in range(size)]  # rank 0 has none
        assert grace.allgather(rows[rank]).equal(torch.cat(rows))
        for shape in ((), (0,), (2, 3)):
            theirs = of(size - 1, shape, torch.float32).to(dtype)
            got = grace.broadcast(of(rank, shape, torch.float32).to(dtype), root_rank=size - 1, name="last")
            assert got.equal(theirs)
            assert got.shape == torch.Size(shape)
    assert grace.allgather(torch.tensor(rank)).tolist() == list(range(size))
    assert grace.allgather(torch.ones(0, 3)).shape == (0, 3)
    assert grace.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert grace.broadcast_object(rank) == 0
    assert grace.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    grace.barrier()
    assert grace.is_initialized()
    assert (grace.local_size(), grace.local_rank()) == (size, rank)


@EVERYWHERE
@on_ranks()
def test_gradients_flow_through_as_horovods(engine, size):
    """Gradients through each of them, and those of Horovod's own where that is the engine."""
    rank = grace.rank()
    ways = [grace]
    if grace.init().name == "horovod":
        import horovod.torch as hvd

        ways.append(hvd)
    answers = []
    for way in ways:
        found = []
        for run in (
            lambda x, way=way: way.allreduce(x, op=way.Sum) * (rank + 1),
            lambda x, way=way: way.allreduce(x) * (rank + 1),
            lambda x, way=way: way.allgather(x).cumsum(0) * (rank + 1),
            lambda x, way=way: way.broadcast(x, root_rank=1) * (rank + 1),
        ):
            x = of(rank, (2, 3), torch.float32).requires_grad_()
            run(x).sum().backward()
            found.append(x.grad.tolist())
        answers.append(found)
    assert answers.count(answers[0]) == len(ways)
    total, mean = size * (size + 1) / 2, (size + 1) / 2
    assert answers[0][0] == [[total] * 3] * 2
    assert answers[0][1] == [[mean] * 3] * 2
    assert answers[0][3] == [[mean if rank == 1 else 0.0] * 3] * 2


@EVERYWHERE
@on_ranks()
def test_start_values_come_from_the_root_by_its_name_in_horovod(engine, size):
    """Every rank starts with rank 1's model and optimizer, as scripts for Horovod write it."""
    for give in (
        lambda model: model.state_dict(),
        lambda model: model,
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
    ):
        model = net(seed=grace.rank())
        grace.broadcast_parameters(give(model), root_rank=1)
        assert digest(weights(model)) == digest(weights(net(seed=1)))
    made = torch.optim.SGD(model.parameters(), lr=0.1 * (grace.rank() + 1), momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    made.step()
    grace.broadcast_optimizer_state(made, root_rank=1)
    assert made.param_groups[0]["lr"] == 0.2
    return digest([state["momentum_buffer"] for state in made.state.values()])


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not today")


def apart():
    """Return the refusals, by case, of ranks that do not call the same; afterwards they are in step again."""
    last, told = grace.rank() == grace.size() - 1, {}
    one, two, model = torch.ones(1), torch.ones(2), torch.nn.Linear(1, 1)
    for case, mine in {
        "shapes": lambda: grace.allreduce(two if last else one),
        "dtypes": lambda: grace.allreduce(one.int() if last else one),
        "operations": lambda: grace.allreduce(one, op=grace.Sum if last else grace.Average),
        "names": lambda: grace.allreduce(one, name="loss" if last else "accuracy"),
        "rows": lambda: grace.allgather(torch.ones(1, 3 if last else 2)),
        "roots": lambda: grace.broadcast(one, 1 if last else 0),
        "functions": lambda: grace.allreduce(one) if last else grace.allgather(one),
        "objects": lambda: grace.allgather_object(1) if last else grace.broadcast_object(1),
        "parameters": lambda: grace.broadcast_parameters(model) if last else grace.barrier(),
        "refused": lambda: grace.allreduce(one > 0 if last else one),
        "no rank": lambda: grace.broadcast_object(1, 7 if last else 0),
        "pickle": lambda: grace.allgather_object(Unpicklable() if last else 1),
    }.items():
        with pytest.raises((grace.GraceError, ValueError)) as caught:
            mine()
        told[case] = f"{caught.type.__name__}: {caught.value}"
        assert grace.allreduce(torch.tensor(float(grace.rank())), op=grace.Sum).item() == sum(range(grace.size()))
    return told


@EVERYWHERE
def test_ranks_that_call_different_things_are_refused_by_name_and_go_on(engine, size):
    first, *_, last = launched(engine, size).run(apart)
    for case in ("shapes", "dtypes", "operations", "names", "rows", "roots", "functions", "objects", "parameters"):
        assert first[case] == last[case]
        assert first[case].startswith("RankError: the ranks do different things: "), first[case]
    assert "allreduce() of float32[1] (average)" in first["shapes"]
    assert f"rank {size - 1} is in allreduce() of float32[2] (average)" in first["shapes"]
    assert "named 'loss'" in first["names"]
    assert f"rank {size - 1} is in allreduce() of " in first["functions"]
    assert "in allgather() of " in first["functions"]
    assert first["refused"].startswith("RankError: ")
    assert "refused" in first["refused"]
    assert last["refused"].startswith("ConfigError: it does not sum torch.bool")
    assert last["no rank"].startswith("ConfigError: root_rank=7: the ranks are 0 to ")
    assert first["no rank"].startswith("RankError: ")
    assert first["pickle"] == f"RankError: rank {size - 1} failed: ValueError: not today"
    assert last["pickle"] == "ValueError: not today"


@pytest.mark.parametrize(
    "make", [torch.nn.Sequential, lambda one: torch.nn.ModuleList([one])], ids=["sequence", "list"]
)
def test_a_module_that_is_a_list_of_others_is_a_module(local, make):
    grace.broadcast_parameters(make(torch.nn.Linear(2, 1)), root_rank=0)


def test_what_is_no_tensor_is_passed_over(local):
    for given in ({"version": 3, "weight": torch.ones(2)}, {}, [("version", 3), ("weight", torch.ones(2))]):
        grace.broadcast_parameters(given, root_rank=0)
    with pytest.raises(grace.ConfigError, match=r"broadcast_parameters takes a torch or Keras object; builtins\.int"):
        grace.broadcast_parameters(3)


# -- one process ------------------------------------------------------------------------------------------------------


def test_one_process_gets_what_it_gives(local):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert grace.allreduce(x).tolist() == grace.allgather(x).tolist() == grace.broadcast(x, 0).tolist() == [1.0, 2.0]
    grace.allreduce(x, op=grace.Sum).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    assert (grace.local_size(), grace.join(), grace.barrier()) == (1, 0, None)


def test_what_cannot_work_is_refused_in_words(local):
    one = torch.ones(1)
    for call, said in {
        lambda: grace.allreduce(one, True, op=grace.Sum): r"op= and average= are two ways to say the same",
        lambda: grace.allreduce(one, op="max"): r"op must be 'average' or 'sum', not 'max'",
        lambda: grace.allreduce(one.to_sparse()): r"takes a dense tensor with values",
        lambda: grace.allgather(torch.ones(1, device="meta")): r"takes a dense tensor with values",
        lambda: grace.allreduce(3.0): r"allreduce takes a torch or Keras object; builtins.float is not one",
        lambda: grace.broadcast(one, root_rank=1): r"root_rank=1: the ranks are 0 to 0",
        lambda: grace.broadcast(one, root_rank=True): r"root_rank=True: the ranks are 0 to 0",
        lambda: grace.broadcast_parameters([one], root=2): r"root=2: the ranks are 0 to 0",
        lambda: grace.from_root(lambda: 1, root=-1): r"root=-1: the ranks are 0 to 0",
    }.items():
        with pytest.raises(grace.ConfigError, match=said):
            call()


@pytest.mark.parametrize("name", ["Adasum", "Min", "allreduce_", "callbacks", "elastic", "nccl_built"])
def test_horovods_names_that_are_not_there_say_what_is(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; in place of hvd\.{name} take \w"):
        getattr(grace, name)
    with pytest.raises(AttributeError, match=r"no attribute 'allredcue'$"):
        grace.allredcue  # noqa: B018


def test_horovods_compression_by_graces_name_is_a_compressor(local):
    model = torch.nn.Linear(2, 1)
    for compression, wanted in {
        grace.Compression.none: torch.full((1, 2), 0.1),
        grace.Compression.fp16: torch.full((1, 2), 0.1).half().float(),
    }.items():
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made = grace.DistributedOptimizer(made, model.named_parameters(), compression=compression)
        model(torch.full((1, 2), 0.1)).sum().backward()
        made.synchronize()
        assert model.weight.grad.equal(wanted)
        made.zero_grad()
        made.close()
    plain = torch.optim.SGD(model.parameters())
    with pytest.raises(grace.ConfigError, match="compression= is Horovod's"):
        grace.DistributedOptimizer(plain, model, "topk", compression=grace.Compression.fp16)


# -- join -------------------------------------------------------------------------------------------------------------


def after_uneven_data(method, how):
    """A model and its optimizer, and Horovod's join(), Grace's or the optimizer's."""
    model = net(seed=grace.rank())
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = grace.DistributedOptimizer(made, model.named_parameters(), method)
    train(model, made, range(2 + (2 * grace.rank() if method == "none" else 0)))
    join = {"grace": grace.join, "opt": made.join, "hvd": getattr(sys.modules.get("horovod.torch"), "join", None)}[how]
    return model, made, join


@pytest.mark.parametrize("how", ["hvd", "grace", "opt"])
@on_ranks(2, engine="horovodrun-gloo")
def test_join_under_horovod_is_the_optimizers(how):
    model, made, join = after_uneven_data("none", how)
    assert join() == 1
    made.close()
    _, made, join = after_uneven_data("topk(ratio=0.5)", how)
    said = refusal(join)
    assert said.startswith("the other ranks can go on after join() only if everything is summed")
    return digest(weights(model))


@pytest.mark.parametrize("how", ["grace", "opt"])
@on_ranks(2)
def test_join_on_other_engines_is_refused_with_what_to_do(how):
    _, made, join = after_uneven_data("topk(ratio=0.5)", how)
    said = refusal(join)
    assert said.startswith("join() lets ranks with more batches go on without this one, which only Horovod's sums")
    assert "grace.allreduce(torch.tensor(float(more))) < 1" in said
    made.close()


@on_ranks(2)
def test_join_without_an_optimizer_is_refused():
    said = refusal(grace.join)
    assert said.startswith("join() is a matter of one distributed optimizer, and this program has none")
