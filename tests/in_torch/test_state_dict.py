"""torch.distributed.checkpoint, torch.compile and DDP around what is saved: nothing of it is lost or renamed."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import grace
from grace.errors import StepError
from tests.support.checkpoints import made, sealed
from tests.support.pools import on_ranks, ranks_of
from tests.support.training import digest, distributed, net, state_of, train, train_given, weights

STOP, END = 3, 6


@pytest.mark.parametrize("compressor", ["topk(ratio=0.1)", "powersgd(rank=2)"])
@on_ranks()
def test_torchs_state_dict_functions_keep_memories_and_exchange_nothing(tmp_path, compressor):
    """Saved by torch's functions halfway, loaded by them into a new optimizer: the end, there and uninterrupted."""
    model = net()
    optimizer = distributed(model, compressor)
    train(model, optimizer, range(STOP))
    optimizer.zero_grad()
    mine, theirs = get_state_dict(model, optimizer)
    assert not any(key.startswith("grace") for group in optimizer.param_groups for key in group)
    dcp.save({"model": mine, "optimizer": theirs}, checkpoint_id=tmp_path)
    train(model, optimizer, range(STOP, END))

    other = net(seed=9)
    again = distributed(other, compressor)
    channel = again._grace.runner.channel
    before = channel.sent_bytes, channel.started
    mine, theirs = get_state_dict(other, again)  # torch makes the optimizer's state by a step of its own
    assert again._grace.context.step == 0
    assert not again._grace.synchronized
    entry = {"model": mine, "optimizer": theirs}
    dcp.load(entry, checkpoint_id=tmp_path)
    set_state_dict(other, again, model_state_dict=entry["model"], optim_state_dict=entry["optimizer"])
    assert (channel.sent_bytes, channel.started) == before
    assert not any(key.startswith("grace") for group in again.param_groups for key in group)
    train(other, again, range(STOP, END))
    assert digest(weights(other)) == digest(weights(model))
    return digest(weights(other))


@on_ranks(2)
def test_what_torchs_functions_cannot_keep_is_said():
    """A plain optimizer's state, and one that torch flattened: what is said."""
    model, other = net(), net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = distributed(other, "topk(ratio=0.1)")
    _, theirs = get_state_dict(model, plain)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_state_dict(other, optimizer, model_state_dict=other.state_dict(), optim_state_dict=theirs)
        said.append([str(warning.message) for warning in caught])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_state_dict(other, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        said.append([str(warning.message) for warning in caught])
    plain, flat = said
    assert any("plain optimizer" in words for words in plain)
    assert any("grace.torch.Memories(optimizer)" in words for words in flat)


@pytest.mark.parametrize("wrapped", [False, True], ids=["optimizer", "hook"])
@on_ranks(2)
def test_one_rank_may_ask_torch_for_the_state_of_an_optimizer_that_has_none(wrapped):
    """torch steps to make the optimizer's state, and clears gradients: no step of training."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if wrapped:
        trained = torch.nn.parallel.DistributedDataParallel(model)
        state = grace.torch.register_ddp_hook(trained, "topk(ratio=0.1)", optimizer=optimizer)
    else:
        trained, state = model, grace.DistributedOptimizer(optimizer, model, compressor="topk(ratio=0.1)")
    for step in range(STOP):
        if grace.rank() == 0:
            get_state_dict(model, optimizer)
        train(trained, optimizer, [step])
        optimizer.zero_grad()
    state.close()
    return digest(weights(model))


@on_ranks(2)
def test_a_rank_whose_adam_alone_counts_torchs_step_is_out_of_step():
    model = net()
    optimizer = grace.DistributedOptimizer(torch.optim.Adam(model.parameters()), model, compressor="topk(ratio=0.1)")
    if grace.rank() == 0:
        get_state_dict(model, optimizer)
    with pytest.raises(StepError, match=r"left out optimizer.step\(\)"):
        train(model, optimizer, range(2))
    optimizer.close()


@on_ranks(2)
def test_the_step_by_which_torch_makes_an_optimizers_state_takes_no_anchors():
    """Weights that are loaded after it are what ranks start from."""
    model = net(seed=9)
    optimizer = grace.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.0), model, outer="nesterov", period=2
    )
    get_state_dict(model, optimizer)
    model.load_state_dict(net().state_dict())
    train(model, optimizer, range(2))
    optimizer.close()
    assert digest(weights(model)) == digest(weights(net()))


def saved_whole(folder, packed):
    model, optimizer = made()
    train_given(model, optimizer, range(STOP))
    dcp.save({"optimizer": optimizer.full_state_dict(packed=packed)}, checkpoint_id=folder)
    return state_of(optimizer)["memory"]


def loaded_whole(folder, packed):
    """The memories, or why they were refused."""
    model, optimizer = made()
    train_given(model, optimizer, range(1))  # torch fills only what is there: momenta too
    entry = {"optimizer": optimizer.full_state_dict(packed=packed)}
    if not packed:  # as a new optimizer's, which has no memories yet
        entry["optimizer"]["grace"] = made()[1].full_state_dict()["grace"]
    dcp.load(entry, checkpoint_id=folder)
    try:
        optimizer.load_state_dict(entry["optimizer"])
    except grace.ConfigError as error:
        return str(error)
    return state_of(optimizer)["memory"]


def test_a_packed_full_state_goes_through_torchs_checkpoints_whole(two_ranks, tmp_path):
    kept = two_ranks.run(saved_whole, str(tmp_path / "packed"), True)
    for own, loaded in zip(kept, two_ranks.run(loaded_whole, str(tmp_path / "packed"), True), strict=True):
        assert digest(loaded) == digest(own)
    mean = {name: (kept[0][name] + kept[1][name]) / 2 for name in kept[0]}
    for loaded in ranks_of(3).run(loaded_whole, str(tmp_path / "packed"), True):
        assert digest(loaded) == digest(mean)
    two_ranks.run(saved_whole, str(tmp_path / "spread"), False)
    for message in two_ranks.run(loaded_whole, str(tmp_path / "spread"), False):
        assert "should hold the memory of" in message
        assert "full_state_dict(packed=True)" in message


def wrapped(wrapper):
    """A model as wrappers name its parameters."""
    model = net()
    if wrapper:
        model = torch.compile(model)
    return torch.nn.DataParallel(model) if wrapper == "both" else model  # named as under DDP, and nothing else


@on_ranks()
def test_wrappers_rename_nothing():
    """Every way of wrapping, after a checkpoint of every other: all runs end alike."""
    ends, halves = set(), {}
    for wrapper in ("", "compile", "both"):
        model = wrapped(wrapper)
        names = [name for name, _ in model.named_parameters()]
        assert names[0] == {"": "", "compile": "_orig_mod.", "both": "module._orig_mod."}[wrapper] + "scale"
        optimizer = distributed(model, "randomk(ratio=0.1)")
        plain = getattr(model, "module", model)
        plain = getattr(plain, "_orig_mod", plain)
        if wrapper:
            plain.load_state_dict(halves[""][0])
            before = copy.deepcopy(halves[""][1])  # torch's part would change with the run that loads it
            optimizer.load_state_dict(before if wrapper == "compile" else under_wrapped_names(before))
        else:
            train(plain, optimizer, range(STOP))
            halves[""] = {n: v.clone() for n, v in plain.state_dict().items()}, copy.deepcopy(optimizer.state_dict())
        train(plain, optimizer, range(STOP, END))
        ends.add(digest(weights(plain)))
    assert len(ends) == 1
    return ends


def under_wrapped_names(saved):
    """A checkpoint whose names carry what wrappers put into them."""

    def rename(values):
        return {f"module._orig_mod.{name}": value for name, value in values.items()}

    entry = {**saved["grace"], "pieces": rename(saved["grace"]["pieces"])}
    entry["state"] = {kind: rename(values) for kind, values in entry["state"].items()}
    entry["shared"] = {kind: list(rename(dict.fromkeys(names))) for kind, names in entry["shared"].items()}
    return sealed({**saved, "grace": entry})
