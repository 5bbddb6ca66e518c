"""Models that exchange through Grace are saved, copied and averaged as they are without it."""

import copy
import io

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import grace
from grace.torch.ddp import EarlyState, grace_hook
from grace.torch.pickling import InertState
from tests.support.pools import on_ranks
from tests.support.sharded import built, compressed, loss_of, mesh_of
from tests.support.training import ddp, digest, distributed, net, sgd, train, weights


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(value):
    return AveragedModel(value).module


WAYS = [copy.deepcopy, saved_and_loaded, averaged]


def hooked(early):
    """A model that has trained with Grace's hook, or with a stand-in that got its state later, and the state."""
    wrapped = ddp(net())
    if early:
        wrapped.register_comm_hook(EarlyState(), grace_hook)
    state = grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)")
    train(wrapped, sgd(wrapped.parameters()), range(2))
    return wrapped, state


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_the_copy_of_a_model_with_grace_s_hook_is_a_plain_one(way, early):
    wrapped, state = hooked(early)
    before = digest(state.state_dict())
    copied = way(wrapped)
    plain = ddp(copy.deepcopy(wrapped.module))
    assert [type(of) for _, of in copied._comm_hooks] == [InertState]
    with pytest.raises(AttributeError, match="has no 'traffic': it exchanges nothing"):
        assert copied._comm_hooks[0][1].traffic
    for model in (copied, plain):
        train(model, sgd(model.parameters()), range(2, 5))
    assert digest(weights(copied.module)) == digest(weights(plain.module))
    assert digest(state.state_dict()) == before  # the copy's training does not reach the model's memories
    return digest(weights(copied.module))


@pytest.mark.parametrize("early", [False, True])
@on_ranks(2)
def test_a_copy_may_have_a_hook_of_its_own(early):
    copied = copy.deepcopy(hooked(early)[0])
    other = ddp(copy.deepcopy(copied.module))
    states = [grace.torch.register_ddp_hook(model, "topk(ratio=0.1)") for model in (copied, other)]
    for model in (copied, other):
        train(model, sgd(model.parameters()), range(3))
    assert digest(weights(copied.module)) == digest(weights(other.module))
    assert [state.traffic.steps for state in states] == [3, 3]


class WithOptimizer(torch.nn.Module):
    """A model that holds its distributed optimizer, as modules of frameworks do."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.optimizer = distributed(self.net, "topk(ratio=0.1)")


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_the_copy_of_a_module_has_a_copy_of_the_optimizer_inside(way):
    module = WithOptimizer()
    train(module.net, module.optimizer, range(2))
    copied = way(module)
    held = [p for group in copied.optimizer.param_groups for p in group["params"]]
    assert all(p is own for p, own in zip(held, copied.net.parameters(), strict=True))
    grace.DistributedOptimizer(copied.optimizer, copied.net.named_parameters(), "topk(ratio=0.1)")
    copied.optimizer.load_state_dict(copy.deepcopy(module.optimizer.state_dict()))  # torch would share the momenta
    for one in (module, copied):
        train(one.net, one.optimizer, range(2, 4))
    assert digest(weights(copied.net)) == digest(weights(module.net))


@on_ranks(4)
def test_states_of_sharded_models_are_copied_as_inert_ones():
    """fully_shard lets no model be copied, but a program's own objects may hold the states."""
    net = built(mesh_of()["shard"])
    with compressed(net, "topk(ratio=0.1)", "block(bits=4)") as states:
        loss_of(net, 0).backward()
        for way in (copy.copy, copy.deepcopy, saved_and_loaded):
            assert [type(way(state)) for state in states] == [InertState] * 2
