"""Ranks load what was saved at the same moment and is whole, or nothing."""

import copy

import torch

import grace
from tests.support.checkpoints import load, made, sealed
from tests.support.training import copied, digest, train_given


def saves():
    """Return the states of steps 2 and 4, of step 4 again after going back, and of a plain optimizer."""
    model, optimizer = made()
    train_given(model, optimizer, range(2))
    early = copied(optimizer.state_dict())
    train_given(model, optimizer, range(2, 4))
    late = copied(optimizer.state_dict())
    optimizer.load_state_dict(copied(early))
    train_given(model, optimizer, range(2, 4))
    plain = copied(late)
    del plain["grace"]
    return {"early": early, "late": late, "again": copied(optimizer.state_dict()), "plain": plain}


def flipped(saved):
    """One bit of a residual is another."""
    values = saved["grace"]["state"]["memory"]["v"]
    values.view(torch.int32)[3] ^= 1 << 30
    return saved


def with_nan(saved):
    saved["grace"]["state"]["memory"]["v"][3] = float("nan")
    return sealed(saved)


def other_groups(saved):
    groups = copy.deepcopy(saved["param_groups"])
    groups[0]["params"].append(7)
    return {**saved, "param_groups": groups}


def former(saved):
    """Return a state in another version of the format."""
    return {**saved, "grace": {**saved["grace"], "version": 1}}


def answers():
    kept, rank = saves(), grace.rank()
    two, three = saves(), {}
    model, optimizer = made()
    train_given(model, optimizer, range(1))
    for what, first, second, memory in (
        ("steps", kept["late"], kept["early"], "strict"),
        ("saves", kept["late"], kept["again"], "strict"),
        ("runs", kept["late"], two["late"], "keep"),
        ("plain", kept["late"], kept["plain"], "strict"),
        ("plain kept", kept["plain"], kept["late"], "keep"),
        ("flipped", flipped(copied(kept["late"])), kept["late"], "strict"),
        ("nan", kept["late"], with_nan(copied(kept["late"])), "strict"),
        ("torch", kept["late"], other_groups(copied(kept["late"])), "strict"),
        ("form", {"param_groups": None}, kept["late"], "strict"),
        ("flipped kept", flipped(copied(kept["late"])), kept["late"], "keep"),
        ("former", former(copied(kept["late"])), kept["late"], "strict"),
        ("right", kept["late"], kept["late"], "strict"),
    ):
        three[what] = load(optimizer, copied((first, second)[rank]), memory)  # which sees that nothing has changed
    ids = [kept[name]["grace"]["id"] for name in ("early", "late", "again")]
    full = copied(optimizer.full_state_dict())["grace"]
    return (
        three,
        ids,
        full["id"],
        digest(optimizer.state_dict()["grace"]["state"]) == digest(kept["late"]["grace"]["state"]),
    )


SAID = {
    "steps": "RankError: rank 0 loads a checkpoint of step 4, rank 1 a checkpoint of step 2.",
    "saves": "RankError: rank 0 loads a checkpoint of the save ",
    "runs": "RankError: rank 0 loads a checkpoint of the save ",
    "plain kept": "RankError: rank 0 loads a checkpoint of a plain optimizer, rank 1 a checkpoint of step 4",
}
REFUSED = {
    "plain": (1, "ConfigError: the checkpoint has no 'grace' entry"),
    "flipped": (0, "ConfigError: the checkpoint is damaged: the memory of 'v' is not what was saved"),
    "nan": (1, "ConfigError: the checkpoint holds the memory of 'v', which is not finite"),
    "former": (0, "ConfigError: the checkpoint's format is version 1, this Grace reads 2"),
    "torch": (1, "ValueError: loaded state dict contains a parameter group"),
    "form": (0, "ConfigError: the checkpoint's part of the optimizer itself is damaged: TypeError"),
}


def test_ranks_load_what_was_saved_at_one_moment_and_is_whole(two_ranks):
    (first, ids, full, same), (second, other_ids, other_full, other_same) = two_ranks.run(answers)
    for what, words in SAID.items():
        assert first[what].startswith(words), what
        assert second[what] == first[what]
    for what, (whose, words) in REFUSED.items():
        answers_of = first[what], second[what]
        assert answers_of[whose].startswith(words), (what, answers_of)
        told = answers_of[whose].removeprefix("ConfigError: ")
        assert answers_of[1 - whose] == f"RankError: rank {whose} did not load its checkpoint: {told}"
    assert "the memory of 'v'" in first["flipped kept"]
    assert (first["right"], second["right"]) == ("", "")
    assert (ids, full, same, other_same) == (other_ids, other_full, True, True)
    assert len({*ids, full}) == 4
