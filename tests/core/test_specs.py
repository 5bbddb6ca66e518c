"""Specs name components and parameters; traits say what goes together."""

import dataclasses
import re
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grace
from grace import ConfigError
from grace.communicators import Allgather
from grace.communicators.choice import build_communicator
from grace.core import specs
from grace.core.registry import KINDS, legal_communicators
from tests.support.methods import BUILTIN

UNIT = st.floats(0, 1, exclude_min=True)
DICTS = {
    "compressor": st.one_of(
        st.just({"name": "none"}),
        st.fixed_dictionaries({"name": st.just("cast"), "dtype": st.sampled_from(["fp16", "bf16"])}),
        st.fixed_dictionaries(
            {"name": st.just("qsgd")},
            optional={
                "levels": st.integers(1, 127),
                "bucket_size": st.integers(1, 10**6),
                "norm": st.sampled_from(["l2", "max"]),
            },
        ),
        st.fixed_dictionaries({"name": st.just("topk"), "ratio": UNIT}),
        st.fixed_dictionaries({"name": st.just("randomk"), "ratio": UNIT, "unbiased": st.booleans()}),
        st.fixed_dictionaries({"name": st.just("powersgd"), "rank": st.integers(1, 99), "warm_start": st.booleans()}),
        st.sampled_from(["signsgd", "efsignsgd"]).map(lambda name: {"name": name}),
    ),
    "memory": st.one_of(
        st.sampled_from(["none", "efsignsgd"]).map(lambda name: {"name": name}),
        st.fixed_dictionaries({"name": st.just("residual"), "beta": st.floats(0, 1), "gamma": UNIT}),
    ),
}


@pytest.mark.parametrize("kind", DICTS)
@given(choice=st.data())
def test_a_spec_survives_the_round_trip_in_both_forms(kind, choice):
    spec = choice.draw(DICTS[kind])
    component = grace.make(kind, spec)
    assert spec.items() <= component.to_dict().items()
    for form in (component.spec, component.to_dict()):
        again = grace.make(kind, form)
        assert again == component
        assert again.to_dict() == component.to_dict()
        assert again.spec == component.spec


def test_numpy_numbers_make_specs_that_can_be_read():
    component = grace.make("compressor", {"name": "topk", "ratio": np.float64(0.25)})
    assert component.spec == "topk(ratio=0.25)"
    assert type(component.to_dict()["ratio"]) is float


@pytest.mark.parametrize(
    ("text", "name", "parameters"),
    [
        ("topk", "topk", {}),
        ("topk()", "topk", {}),
        (" topk( ratio = 0.5 ) ", "topk", {"ratio": 0.5}),
        ("topk(ratio=5e-1,)", "topk", {"ratio": 0.5}),
        ("x(a=-1, b='l2', c=l2, d=true, e=False, f=None, g=[1, 2])", "x",
         {"a": -1, "b": "l2", "c": "l2", "d": True, "e": False, "f": None, "g": [1, 2]}),
        ("x(a=b(c=d(e=[f(g=1)])))", "x", {"a": "b(c=d(e=[f(g=1)]))"}),
        ("x(a=b(c=1) | d(e='|'), g=[{'h': i(j=1) | k, 'l': {'m': true}}, n])", "x",
         {"a": "b(c=1) | d(e='|')", "g": [{"h": "i(j=1) | k", "l": {"m": True}}, "n"]}),
    ],
)  # fmt: skip
def test_text_is_read_as(text, name, parameters):
    assert specs.parse(text) == (name, parameters)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk(0.1)", "write parameters by name, as in topk"),
        ("topk(**x)", "write parameters by name"),
        ("topk(ratio=a+b)", "ratio is not a number, a word, a spec or a literal"),
        ("topk(ratio={[]: 1})", "is not a number, a word, a spec or a literal"),
        ("a(b={**c})", "b is not a number, a word, a spec or a literal"),
        ("a(b=[c(d=e(1))])", r"e\(1\): write parameters by name"),
        ("a(b=c(d=1, d=1))", r"c\(d=1, d=1\): a parameter is given twice"),
        ("a(b=c | d | e)", "'c | d | e': a composition has two parts"),
        ("topk(ratio=1, ratio=1)", "a parameter is given twice"),
        ("topk ratio", "cannot read the spec 'topk ratio'"),
        ("a.b(c=1)", "cannot read the spec"),
        ("", "cannot read the spec ''"),
        ("x\0", "cannot read the spec"),
        ("x\ud800", "cannot read the spec"),
        ({"ratio": 0.1}, "a dict spec needs a 'name'"),
        (3, "a spec is text like 'topk"),
    ],
)
def test_a_malformed_spec_is_refused_with_a_right_one(spec, message):
    with pytest.raises(ConfigError, match=message):
        specs.parse(spec)


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("compressor", "topkk", r"unknown compressor 'topkk' \(did you mean 'topk'\?\); known: .*fp16.*qsgd"),
        ("compressor", "bf61", "did you mean 'bf16'"),
        ("memory", "residuals", "did you mean 'residual'"),
        ("communicator", "alreduce", "did you mean 'allreduce'"),
        ("compressor", "zzz", "unknown compressor 'zzz'; known: "),
        ("compressor", "auto", r"unknown compressor 'auto' \(it is a builder: strategy='auto'\); known: adaptive"),
        ("builder", "nesterov", r"unknown builder 'nesterov' \(it is an outer optimizer: outer='nesterov'\)"),
        ("compressor", "topk(ration=0.1)", r"topk has no parameter 'ration'; it has: ratio=0.01"),
        ("compressor", "signsgd(ratio=0.1)", "signsgd has no parameter 'ratio'; it has: none"),
        ("compressor", {"name": "qsgd", 7: 1}, "no parameter 7; it has: levels=127, bucket_size=512, norm='max'"),
        ("compressor", "topk(ratio=0)", r"ratio must be a number in \(0, 1\], not 0"),
        ("compressor", "topk(ratio=1.1)", r"ratio must be a number in \(0, 1\], not 1.1"),
        ("compressor", "topk(ratio=nan)", "ratio must be a number"),
        ("compressor", {"name": "topk", "ratio": float("nan")}, "ratio must be a number"),
        ("compressor", "topk(ratio=true)", "ratio must be a number"),
        ("compressor", "qsgd(levels=128)", r"levels must be a whole number in \[1, 127\], not 128"),
        ("compressor", "qsgd(levels=7.0)", "levels must be a whole number"),
        ("compressor", "qsgd(levels=true)", "levels must be a whole number"),
        ("compressor", "qsgd(bucket_size=0)", "bucket_size must be a whole number"),
        ("compressor", "qsgd(norm=l1)", "norm must be one of 'max', 'l2', not 'l1'"),
        ("compressor", "cast(dtype=fp8)", "dtype must be one of 'fp16', 'bf16'"),
        ("compressor", "randomk(unbiased=1)", "unbiased must be one of False, True, not 1"),
        ("compressor", "powersgd(rank=0)", "rank must be a whole number"),
        ("memory", "residual(beta=2)", r"beta must be a number in \[0, 1\]"),
        ("memory", "residual(gamma=0)", r"gamma must be a number in \(0, 1\]"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused_with_what_is_right(kind, spec, message):
    with pytest.raises(ConfigError, match=message):
        grace.make(kind, spec)


def test_short_names_stand_for_a_component_with_parameters():
    assert grace.make("compressor", "bf16").spec == "cast(dtype='bf16')"
    assert grace.make("compressor", "fp16") == grace.make("compressor", "cast")


def test_an_object_is_taken_as_it_is_and_only_in_its_place():
    topk = grace.make("compressor", "topk")
    assert grace.make("compressor", topk) is topk
    with pytest.raises(ConfigError, match="TopK is a compressor, where a memory is needed"):
        grace.make("memory", topk)


# -- traits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*BUILTIN, "randomk(unbiased=true)"])
def test_defaults_are_legal_and_silent(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        communicator = build_communicator(spec, None, None)
    traits = communicator.compressor.traits
    assert communicator.name == traits.communicator
    assert communicator.memory.name == traits.memory
    assert traits.communicator in legal_communicators(communicator.compressor)
    assert dataclasses.replace(traits) == traits
    assert not (traits.unbiased and not traits.exact and traits.memory != "none")


def test_a_communicator_object_comes_with_its_own_parts():
    communicator = Allgather("topk")
    assert build_communicator(None, None, communicator) is communicator
    with pytest.raises(ConfigError, match="the communicator object holds its compressor and memory"):
        build_communicator("topk", None, communicator)
    with pytest.raises(ConfigError, match="unknown communicator 'allgathr'"):
        build_communicator("topk", None, "allgathr")


@pytest.mark.parametrize("kind", KINDS)
def test_every_builtin_component_has_a_documented_example(kind):
    for cls in grace.known(kind).values():
        assert not re.match(r"grace\.(compressors|memories|communicators)\.", cls.__module__) or ">>>" in cls.__doc__
