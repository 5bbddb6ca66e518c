"""Classes of methods, and the bound of every variable."""

import math

import numpy as np
import pytest
import torch

from grace.core.registry import known
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.error_budget import (
    CLASSES,
    LARGEST,
    SLACK,
    SPARSIFIED_ADAPTIVE,
    ErrorModel,
    allows,
    check_quality,
    class_of,
    synthetic_error,
)
from grace.planner.problem import methods_of, offers
from tests.support.planners import measured

MATRIX, TABLE, VECTOR = Variable("w", (400, 300)), Variable("table", (5000, 16)), Variable("b", (4000,))


def test_classes_follow_traits_and_memories():
    found = {name: class_of(name) for name in known("compressor")}
    assert {name for name, c in found.items() if c == "exact"} == {"none"}
    assert {"qsgd", "natural", "terngrad"} <= {name for name, c in found.items() if c == "unbiased"}
    assert {"topk", "powersgd", "onebit", "efsignsgd", "randomk"} <= {n for n, c in found.items() if c == "feedback"}
    assert {found[name] for name in ("signsgd", "signum", "dgc", "threshold", "inceptionn")} == {None}
    assert class_of("randomk(unbiased=true)") == "unbiased"
    assert class_of("topk", "none") is None
    assert class_of("topk", "dgc") is None
    assert class_of("none", "residual") is None
    for name, made in known("compressor").items():
        if made().votes:
            assert class_of(name, "residual") is None


def test_a_class_allows_those_before_it():
    for i, quality in enumerate(CLASSES):
        assert [allows(quality, other) for other in CLASSES] == [j <= i for j in range(4)]
    with pytest.raises(ConfigError, match="'exact', 'half', 'unbiased', 'feedback', not 'best'"):
        check_quality("best")


def test_methods_offer_themselves_and_none_is_a_vote():
    specs = list(offers())
    assert specs[0] == "none"
    assert 6 <= len(specs) <= 8
    assert all(class_of(spec) is not None for spec in specs)
    assert [spec for spec, tables_only in offers().items() if tables_only] == ["topk(ratio=0.001)"]
    assert "topk(ratio=0.001)" not in [m.compressor for m in methods_of(None, "feedback", 2, tables=False)]


def test_a_matrix_may_lose_what_the_reference_loses_and_other_families_no_more_than_a_part():
    for reference, other in ((0.1, 0.1), (0.9, LARGEST)):
        errors = ErrorModel({"powersgd(rank=4)": {"w": reference}})
        assert errors.bound("powersgd(rank=2)", MATRIX) == reference
        assert errors.bound("topk", MATRIX) == errors.bound("qsgd", MATRIX) == other


def test_tables_and_vectors_have_bounds_of_their_own():
    errors = ErrorModel({"powersgd(rank=4)": {"table": 0.95}}, tables={"table"})
    for variable in (TABLE, VECTOR, Variable("rows", (5000, 16), sparse=True)):
        assert errors.bound("powersgd(rank=4)", variable) == errors.bound("topk", variable) == LARGEST


def test_sparsifiers_may_lose_little_under_adaptive_optimizers():
    errors = ErrorModel(tables={"table"}, adaptive=True)
    for variable in (MATRIX, TABLE, VECTOR):
        assert errors.bound("topk(ratio=0.1)", variable) == SPARSIFIED_ADAPTIVE
        assert errors.bound("qsgd", variable) > SPARSIFIED_ADAPTIVE
    chosen = ErrorModel(adaptive=True, reference="topk(ratio=0.5)")
    assert chosen.bound("topk(ratio=0.1)", MATRIX) == chosen.error("topk(ratio=0.5)", MATRIX)


def test_no_variable_can_lose_everything():
    """On gradients of a recommender, whose tables have the smaller ones, each variable keeps most of its own norm."""
    from grace.bench.workloads.models import workload

    work = workload("ncf", 0)
    work.loss(work.model).backward()
    gradients = {name: p.grad for name, p in work.model.named_parameters()}
    found = measured("powersgd(rank=4)", gradients).errors
    tables = {name for name in gradients if "factors" in name or "features" in name}
    errors = ErrorModel({"powersgd(rank=4)": found}, tables)
    for name, gradient in gradients.items():
        variable = Variable(name, tuple(gradient.shape))
        for spec in offers():
            assert errors.bound(spec, variable) < 0.95
            assert errors.bound(spec, variable) <= max(LARGEST, found.get(name, 0.0))


def test_measured_errors_count_before_synthetic_ones():
    errors = ErrorModel({"topk": {"w": 0.5}})
    assert errors.error("topk(ratio=0.01)", MATRIX) == 0.5  # the same spec in its shortest form
    assert errors.error("efsignsgd", MATRIX) == synthetic_error("efsignsgd", MATRIX.shape)
    assert errors.error("powersgd(rank=4)", VECTOR) == errors.error("signsgd", MATRIX) == 0.0
    with pytest.raises(ConfigError, match="'signsgd' votes"):
        ErrorModel(reference="signsgd")


def test_means_compressed_again_count_twice_without_a_memory():
    errors = ErrorModel({"qsgd": {"w": 0.01}, "powersgd(rank=4)": {"w": 0.1}})
    shares = [
        errors.share("qsgd", name, "none", MATRIX) for name in ("reduce_broadcast", "scatter_reduce", "allgather")
    ]
    assert shares == pytest.approx([0.2, 0.2, 0.1])
    assert errors.share("qsgd", "scatter_reduce", "residual", MATRIX) == pytest.approx(0.1)


def test_a_reference_that_loses_nothing_leaves_room_for_16_bit_floats():
    x = torch.outer(torch.linspace(0.1, 1, 300), torch.linspace(-1, 1, 200))  # of rank 1, which PowerSGD keeps whole
    w = Variable("w", (300, 200))
    lost = float((x - x.half().float()).double().square().sum() / x.double().square().sum())
    errors = ErrorModel({"powersgd(rank=4)": {"w": 1e-14}, "cast": {"w": lost}})
    assert errors.share("fp16", "allreduce", "none", w) <= SLACK < errors.share("qsgd", "allgather", "none", w)


def test_an_exact_reference_allows_no_error():
    errors = ErrorModel(reference="none")
    assert errors.share("fp16", "allreduce", "none", MATRIX) == math.inf
    assert errors.share("none", "allreduce", "none", MATRIX) == 0.0


@pytest.mark.parametrize("spec", ["fp16", "qsgd", "block(bits=4)", "topk(ratio=0.05)", "efsignsgd"])
def test_synthetic_vectors_lose_what_gaussian_gradients_do(spec):
    x = np.random.default_rng(1).standard_normal(20_000).astype("float32")
    found = measured(spec, {"x": x}).errors["x"]
    assert synthetic_error(spec, (20_000,)) == pytest.approx(found, rel=0.1)
