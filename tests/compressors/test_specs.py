"""Layouts from shapes: what methods say of their payloads against the payloads that they give, at every step."""

import itertools
import math
import random
import re
import zlib
from unittest import mock

import numpy as np
import pytest
import torch

import grace
from grace.core.composition import Composed
from grace.core.compressor import AFTER_WARMUP, FIXED_SIZES, Compressor, TensorSpec, Traits
from grace.core.context import Context
from grace.core.registry import known, make
from grace.kernels import Kernels, kernels_of
from tests.support.drawing import THOROUGH, drawn
from tests.support.grouping import in_groups

SHAPES = [(), (0,), (0, 3), (1,), (2,), (7,), (33, 17), (8, 3, 3, 3), (1, 513), (1024,), (4097,), (65_535,), (65_537,)]
STEPS = [0, 1, 3, 50, AFTER_WARMUP]
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 32, 127, 300, 4096] if THOROUGH else [0, 1, 2, 3, 7, 300, 4096]
PARTS = [0.001, 0.05, 0.3, 0.5, 1.0, 2.5] if THOROUGH else [0.001, 0.3, 1.0]
DRAWN = 8 if THOROUGH else 2
"""Number of settings of each method in which all parameters are drawn at random."""
FAR = mock.patch.object(Kernels, "on_device", return_value=True)


def legal(cls, parameters) -> bool:
    try:
        cls(**parameters)
    except grace.ConfigError:
        return False
    return True


def values_of(cls, key, default) -> list:
    """Values to try for a parameter: those of its kind that the method takes alone."""
    if default is None:
        found = [*NUMBERS, *PARTS, *re.findall(r'"(\w+)"', cls.__doc__)]
    elif isinstance(default, bool):
        found = [True, False]
    elif isinstance(default, str):
        found = re.findall(r'"(\w+)"', cls.__doc__)
    else:
        found = NUMBERS if isinstance(default, int) else PARTS
    return [default, *(value for value in found if legal(cls, {key: value}))]


def varied(cls) -> list[Compressor]:
    """The method with its defaults, with each parameter changed, and with all of them drawn at random."""
    choices = {key: values_of(cls, key, default) for key, default in cls.parameters().items()}
    draw = random.Random(zlib.crc32(cls.name.encode()))
    tried = [{}, *({key: value} for key, values in choices.items() for value in values)]
    tried += [{key: draw.choice(values) for key, values in choices.items()} for _ in range(DRAWN if choices else 0)]
    return [cls(**parameters) for parameters in tried if legal(cls, parameters)]


def composes(first, second) -> bool:
    try:
        Composed(make("compressor", first), make("compressor", second))
    except grace.ConfigError:
        return False
    return True


def composed() -> list[Compressor]:
    """Compositions of Grace's methods, sparsifiers with a warm-up and in chunks among them."""
    ours = [cls.name for cls in OURS]
    picks = [name for name in ours if known("compressor")[name].sends_values]
    picks += ["topk(ratio=0.05, warmup_steps=5)", "topk(ratio=0.05, chunk=64, warmup_steps=5)"]
    pairs = [pair for pair in itertools.product(picks, ours) if composes(*pair)]
    return [Composed(*(make("compressor", name) for name in pair)) for pair in drawn(pairs)]


OURS = [cls for cls in known("compressor").values() if cls.__module__.startswith("grace.")]
SPECS = sorted({method.spec for cls in OURS for method in varied(cls)} | {method.spec for method in composed()})
BOUNDED = sorted({method.spec for cls in OURS if cls.bounded for method in varied(cls)})
FEW = ["topk(warmup_steps=10)", "topk(ratio=0.01, chunk=64, warmup_steps=10)", "topk(ratio=0.001, warmup_steps=10)"]


def one_by_method(specs):
    """Run a test with all settings of a method at once."""
    return in_groups(("spec",), [(spec,) for spec in specs], lambda spec: spec.partition("(")[0])


def at(spec, step) -> Compressor:
    compressor = make("compressor", spec)
    compressor.bind(Context(step=step))
    return compressor


def gradient(shape) -> np.ndarray:
    return np.asarray(np.random.default_rng(math.prod(shape)).standard_normal(shape)).astype(np.float32)


def rounds_of(compressor, x) -> list:
    """The payload of each round, as if this were the only rank."""
    if compressor.traits.rounds == 1:
        return [compressor.compress(x, "w")[0]]
    rounds, found = compressor.exchange_all([x], ["w"]), []
    payloads = next(rounds)
    while True:
        found.append(payloads[0])
        try:
            payloads = rounds.send(payloads)
        except StopIteration:
            return found


def fits(spec, payload) -> bool:
    """True if a payload has these dtypes and shapes."""
    if len(spec) != len(payload):
        return False
    for said, tensor in zip(spec, payload, strict=True):
        dtype, shape = kernels_of(tensor).dtype(tensor), tuple(tensor.shape)
        if said.dtype != dtype or len(said.shape) != len(shape) or said.shape[1:] != shape[1:]:
            return False
        if said.shape[:1] not in (shape[:1], (None,)):
            return False
    return True


def same(one, other) -> bool:
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# -- specs are what is sent ----------------------------------------------------------------------------------


def test_all_methods_are_tried_with_changed_parameters():
    names = {spec.partition("(")[0] for spec in SPECS}
    assert names >= {cls.name for cls in OURS}
    for cls in OURS:
        for key in cls.parameters():
            if len({*values_of(cls, key, cls.parameters()[key])}) == 1:
                continue  # the tables of dynamic8
            assert any(f"{key}=" in spec for spec in SPECS if spec.startswith(cls.name)), (cls.name, key)
    assert {spec.partition(" | ")[2].partition("(")[0] for spec in SPECS} >= {"qsgd", "cast", "natural", "dynamic8"}


@one_by_method(SPECS)
def test_specs_bits_and_ctx_are_those_of_payloads(spec):
    asked = make("compressor", spec)
    varies, by_shape = asked.traits.varies, asked.traits.fixed_size == "by shape"
    for shape in SHAPES:
        x = torch.from_numpy(gradient(shape))
        said = [asked.round_specs(shape, step) for step in STEPS]
        assert all(isinstance(spec, list) for rounds in said for spec in rounds)
        assert not by_shape or all(rounds == said[0] for rounds in said)
        for step, rounds in list(zip(STEPS, said, strict=True))[-1 if by_shape else 0 :]:
            compressor = at(spec, step)
            payloads = rounds_of(compressor, x)
            assert len(rounds) == len(payloads) == asked.traits.rounds
            assert all(map(fits, rounds, payloads)), (shape, step, rounds, payloads)
            if len(rounds) == 1:
                assert asked.payload_spec(shape, step) == rounds[0]
            known = all(tensor.known for spec in rounds for tensor in spec)
            assert known == (not varies)
            assert asked.specs(shape, "float32", False, step) == (rounds if known else [None] * len(rounds))
        nbytes = sum(tensor.nbytes for payload in payloads for tensor in payload)  # after the warm-up
        assert compressor.wire_bits(shape) == (None if varies else 8 * nbytes / max(1, math.prod(shape)))
        _, ctx = at(spec, 3).compress(x, "w")
        found = at(spec, 3).ctx_of("w", shape, x)
        if varies and isinstance(compressor, Composed):  # the number of values comes with a payload
            found = (found[0], ctx[1], found[2])
        assert same(found, ctx)


@one_by_method(BOUNDED)
def test_payloads_on_a_device_have_room_by_shape_and_step(spec):
    asked = make("compressor", spec)
    for shape, step in itertools.product(SHAPES, STEPS if "warmup" in spec else STEPS[:1]):
        with FAR:
            payload, _ = at(spec, step).compress(gradient(shape), "w")
        (said,) = asked.specs(shape, "float32", True, step)
        assert said == asked.device_spec(shape, step)
        assert all(tensor.known for tensor in said)
        assert fits(said, payload), (shape, step)


def test_the_room_of_dgc_falls_during_its_warm_up():
    dgc = make("compressor", "dgc(ratio=0.01, warmup_steps=10)")
    room = [dgc.device_spec((10_000,), step)[0].shape[0] for step in range(12)]
    assert room == [round(10_000 * ratio(0.01, 10, step)) for step in range(12)]


def test_the_values_of_an_exact_method_keep_their_dtype():
    none = make("compressor", "none")
    assert none.specs((3, 2), "float64", False, 0) == [[TensorSpec("float64", (3, 2))]]
    assert make("compressor", "cast").specs((3,), "float64", False, 0) == [[TensorSpec("float16", (3,))]]


# -- warm-up of top-k ----------------------------------------------------------------------------------------


def ratio(last, steps, step) -> float:
    """The formula of the DGC paper's warm-up, section 4: exponentially from 25 %."""
    return last if step >= steps else math.exp(math.log(0.25) + step / steps * (math.log(last) - math.log(0.25)))


@pytest.mark.parametrize("spec", FEW)
def test_the_ratio_falls_exponentially_to_its_value(spec):
    topk, counts = make("compressor", spec), []
    for step in range(14):
        part = ratio(topk.ratio, 10, step)
        for n in (100, 6400, 100_000):
            wanted = -(-max(1, round(part * 64)) * n // 64) if topk.chunk else round(part * n)
            payload, _ = at(spec, step).compress(gradient((n,)), "w")
            assert payload[0].shape == (max(1, wanted),) == topk.payload_spec((n,), step)[0].shape
        counts.append(wanted)
    assert counts[0] == 25_000
    assert counts == sorted(counts, reverse=True)
    assert counts[10:] == [make("compressor", spec).count((100_000,))] * 4


@pytest.mark.parametrize("chunk", [0, 128])
def test_a_step_of_the_warm_up_sends_what_its_ratio_sends(chunk):
    x = gradient((10_000,))
    for step in (0, 4, 10, 11):
        warm = at({"name": "topk", "ratio": 0.02, "chunk": chunk, "warmup_steps": 10}, step)
        plain = make("compressor", {"name": "topk", "ratio": ratio(0.02, 10, step), "chunk": chunk})
        (values, where), (wanted, places) = warm.compress(x, "w")[0], plain.compress(x, "w")[0]
        np.testing.assert_array_equal(values, wanted)
        np.testing.assert_array_equal(where, places)
        assert [one.dtype for one in (values, where)] == [one.dtype for one in (wanted, places)]


def test_a_codec_of_whole_buckets_is_told_what_a_chunk_keeps_at_this_step():
    kept = [
        at("topk(ratio=0.01, chunk=64, warmup_steps=10)", step).bucket_codec()[1]["kept"] for step in (0, 5, 10, 11)
    ]
    assert kept == [16, 3, 1, 1]  # 16, 3.2 and 0.64


def test_a_ratio_of_a_quarter_or_more_has_no_warm_up():
    topk = make("compressor", "topk(ratio=0.4, warmup_steps=10)")
    assert {topk.payload_spec((1000,), step)[0].shape for step in range(12)} == {(400,)}


def test_sizes_are_said_to_follow_from_the_step_only_in_a_warm_up():
    fixed = {
        spec: make("compressor", spec).traits.fixed_size for spec in ("topk", *FEW, f"{FEW[1]} | qsgd", "dgc | qsgd")
    }
    assert [*fixed.values()] == ["by shape", *["by shape and step"] * 4, "by data"]
    assert not any(make("compressor", spec).traits.varies for spec in FEW)
    assert all(make("compressor", spec).tensors_size_are_same for spec in FEW)


@pytest.mark.parametrize("spec", ["topk(ratio=0.02, warmup_steps=10)", "topk(ratio=0.02, chunk=64, warmup_steps=10)",
                                  "topk(ratio=0.02, warmup_steps=10) | qsgd(levels=7)"])  # fmt: skip
def test_a_payload_decodes_at_a_later_step_and_with_the_ctx_of_another_rank(spec):
    for n in (5, 63, 64, 65, 1000, 70_000):
        sender, receiver = at(spec, 2), at(spec, 2)
        payload, own = sender.compress(gradient((n,)), "w")
        _, ctx = receiver.compress(-gradient((n,)), "w")
        wanted = sender.decompress(payload, own)
        receiver.context.step = 9
        np.testing.assert_array_equal(receiver.decompress(payload, ctx), wanted)
        assert np.count_nonzero(wanted) <= payload[-1].size * 8


@pytest.mark.parametrize("steps", [-1, 0.5, True, "3"])
def test_what_is_no_number_of_steps_is_refused(steps):
    with pytest.raises(grace.ConfigError, match="warmup_steps"):
        make("compressor", {"name": "topk", "warmup_steps": steps})


# -- what classes say ----------------------------------------------------------------------------------------


def test_true_and_false_mean_by_shape_and_by_data():
    said = [Traits("hybrid", fixed_size=size) for size in (True, False, None, *FIXED_SIZES)]
    assert [one.fixed_size for one in said] == ["by shape", "by data", None, *FIXED_SIZES]
    assert [one.varies for one in said] == [False, True, False, False, False, True]
    assert Traits("hybrid", fixed_size=True) == Traits("hybrid", fixed_size="by shape")


@pytest.mark.parametrize("size", ["by step", "", 1, 0, ["by shape"]])
def test_other_words_are_refused_with_those_that_there_are(size):
    with pytest.raises(grace.ConfigError, match=r"'by shape', 'by shape and step', 'by data', True .*, not "):
        Traits("hybrid", fixed_size=size)


class Halves(Compressor):
    """A user's method that says its payload: half of the elements, fewer at each step."""

    name = "halves"
    traits = Traits("sparsification", fixed_size="by shape and step")

    def payload_spec(self, shape, step):
        return [TensorSpec("float32", (math.prod(shape) // (2 + min(step, 6)),))]


def test_what_a_users_class_says_is_what_its_bits_follow_from():
    assert Halves().wire_bits((80,)) == 32 * 10 / 80
    assert Halves().specs((80,), "float32", False, 0) == [[TensorSpec("float32", (40,))]]
    assert Compressor().wire_bits((80,)) is None
    assert Compressor().specs((80,), "float32", True, 0) == [None]


class Three(Compressor):
    """A user's method of three rounds."""

    traits = Traits("low-rank", rounds=3)


def test_a_method_of_several_rounds_that_says_nothing_is_unknown_in_each():
    assert Three().specs((3, 4), "float32", False, 0) == [None] * 3
    assert Three().wire_bits((3, 4)) is None


class Mine(Compressor):
    """A user's values' method that says nothing of sizes."""

    traits = Traits("quantization")

    def compress(self, tensor, name):
        return [tensor.astype(np.float16)], None

    def decompress(self, payload, ctx):
        return payload[0].astype(np.float32)


def test_a_composition_is_as_fixed_as_its_least_fixed_part():
    def fixed(spec, values):
        return Composed(make("compressor", spec), values).traits.fixed_size

    assert fixed("topk", Mine()) is None
    assert fixed("topk(warmup_steps=3)", Mine()) == "by data"  # nobody knows, and they change
    assert fixed("dgc", Mine()) == "by data"
    assert fixed("topk(warmup_steps=3)", make("compressor", "qsgd")) == "by shape and step"
    assert fixed("topk", make("compressor", "qsgd")) == "by shape"
    assert fixed("topk", make("compressor", "inceptionn")) == "by data"
    assert Composed(make("compressor", "topk"), Mine()).wire_bits((100,)) is None
