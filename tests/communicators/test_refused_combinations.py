"""Every combination of compressor, communicator and memory either is built or is refused with the legal ones.

The tables are written out, not derived from the traits. Methods, memories and communicators that are not in them are
taken by their traits. Memories are restricted in two ways: methods that lose what they leave out need error feedback,
and the dgc memory, which clears the momentum of the entries that were sent, is for sparsifiers.
"""

import contextlib
import re
import warnings

import pytest

import grace
from grace.communicators.choice import build_communicator
from grace.communicators.sparse import row_communicator
from grace.core.registry import legal_communicators, legal_memories, make
from tests.support.grouping import in_groups

AR, AG, BC, SR, RB = "allreduce", "allgather", "broadcast", "scatter_reduce", "reduce_broadcast"
SM = "scatter_merge"
LEGAL = {
    (AR, AG, BC, SR, RB): ["none", "cast", "fp16", "bf16"],
    (AG, BC, SR, RB): [
        *("qsgd", "natural", "terngrad", "onebit", "signsgd", "efsignsgd", "dynamic8"),
        *("block", "block(bits=4, rounding=stochastic)"),
    ],
    (AG, BC, RB): [
        *("signum", "threshold", "dgc", "adaptive", "sketch", "inceptionn"),
        *("topk | qsgd(levels=7)", "dgc | efsignsgd"),
    ],
    (AR, AG, BC, RB): ["randomk", "randomk(unbiased=true)", "randomk | fp16"],  # its indices are of whole tensors
    (AG, BC, RB, SM): ["topk"],
    (AR, RB): ["powersgd"],
    (AG, BC): ["randomk(unbiased=true) | qsgd"],
}
COMMUNICATORS = {method: set(communicators) for communicators, methods in LEGAL.items() for method in methods}
MEMORIES = {"none", "residual", "efsignsgd", "dgc", "loco"}
NEED_A_MEMORY = {"onebit", "powersgd", "dgc", "dgc | efsignsgd"}
FOR_THE_DGC_MEMORY = {
    *("topk", "randomk", "randomk(unbiased=true)", "threshold", "dgc", "adaptive"),
    *("topk | qsgd(levels=7)", "dgc | efsignsgd", "randomk | fp16", "randomk(unbiased=true) | qsgd"),
}
NOISY = {
    *("qsgd", "natural", "terngrad", "block(bits=4, rounding=stochastic)"),
    *("randomk(unbiased=true)", "randomk(unbiased=true) | qsgd", "signsgd", "signum"),
}
for name in set(grace.known("compressor")) - set(COMMUNICATORS):
    COMMUNICATORS[name] = set(legal_communicators(make("compressor", name)))
    FOR_THE_DGC_MEMORY |= {name} if "dgc" in legal_memories(make("compressor", name)) else set()
    NEED_A_MEMORY |= {name} if make("compressor", name).traits.needs_memory else set()
    NOISY |= {name} if make("compressor", name).noisy else set()
for name, communicators in COMMUNICATORS.items():
    communicators |= set(legal_communicators(make("compressor", name))) - {AR, AG, BC, SR, RB, SM}
LATER_MEMORIES = set(grace.known("memory")) - MEMORIES

compressors = in_groups(("compressor",), [(compressor,) for compressor in COMMUNICATORS])


def memories_of(compressor: str) -> set[str]:
    unfit = {"none"} if compressor in NEED_A_MEMORY else set()
    later = LATER_MEMORIES & set(legal_memories(make("compressor", compressor)))
    return (MEMORIES | later) - unfit - (set() if compressor in FOR_THE_DGC_MEMORY else {"dgc"})


def refusal(compressor: str, memory: str | None, communicator: str) -> str:
    with pytest.raises(grace.ConfigError) as caught:
        build_communicator(compressor, memory, communicator)
    return str(caught.value)


@compressors
def test_a_legal_combination_is_built_as_it_was_asked_for(compressor):
    for communicator in COMMUNICATORS[compressor]:
        for memory in memories_of(compressor):
            risky = compressor in NOISY and memory != "none"
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.warns(UserWarning, match="can diverge") if risky else contextlib.nullcontext():
                    built = build_communicator(compressor, memory, communicator)
            spec = make("compressor", compressor).spec
            assert (built.name, built.compressor.spec, built.memory.name) == (communicator, spec, memory)


@compressors
def test_an_illegal_communicator_is_refused_with_the_legal_ones(compressor):
    name = make("compressor", compressor).name
    for communicator in {AR, AG, BC, SR, SM} - COMMUNICATORS[compressor]:
        for memory in (None, *memories_of(compressor)):
            message = refusal(compressor, memory, communicator)
            assert message.startswith(f"{communicator} cannot carry {make('compressor', compressor).spec}: ")
            legal = re.search(f"Legal communicators for {re.escape(name)}: (.*)$", message).group(1)
            assert set(legal.split(", ")) == COMMUNICATORS[compressor]


@pytest.mark.parametrize("compressor", sorted(NEED_A_MEMORY))
def test_no_memory_is_refused_where_error_feedback_is_needed(compressor):
    for communicator in COMMUNICATORS[compressor]:
        message = refusal(compressor, "none", communicator)
        named, legal = re.search(
            r"needs error feedback.*Use memory='(.*)'\. Legal memories for .*: (.*)$", message
        ).groups()
        assert named in memories_of(compressor)
        assert set(legal.split(", ")) == memories_of(compressor)


@in_groups(("compressor",), [(compressor,) for compressor in sorted(set(COMMUNICATORS) - FOR_THE_DGC_MEMORY)])
def test_the_dgc_memory_is_refused_by_all_but_sparsifiers(compressor):
    for communicator in COMMUNICATORS[compressor]:
        message = refusal(compressor, "dgc", communicator)
        assert re.match(f"memory dgc cannot serve {re.escape(make('compressor', compressor).spec)}: ", message)


@pytest.mark.parametrize("compressor", ["qsgd", "powersgd"])
def test_a_refused_memory_is_answered_with_the_legal_ones(compressor):
    message = refusal(compressor, "dgc", make("compressor", compressor).traits.communicator)
    assert memories_of(compressor) <= set(re.findall(r"\w+", message.partition("Legal memories")[2]))


def test_values_whose_noise_is_not_bounded_are_not_accepted_without_a_word():
    with pytest.warns(UserWarning, match=r"topk \| terngrad is not a contraction.*Use values of bounded variance"):
        build_communicator("topk | terngrad", None, None)


def test_a_noisy_method_warns_once_and_not_again_for_rows():
    with pytest.warns(UserWarning, match="not a contraction"):
        dense = build_communicator("qsgd", "residual", AG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert row_communicator(dense, "w").describe() == dense.describe()
