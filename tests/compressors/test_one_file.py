"""A new compressor is one file: cases that are made of the registry have it, and ranks exchange by it."""

import os
import subprocess
import sys

import pytest
import torch

import grace
import grace.torch
from tests.support import ROOT
from tests.support.pools import on_ranks
from tests.support.training import Given, distributed, made_up

PRODUCTS = [
    "tests/compressors/test_specs.py",
    "tests/exchange/test_loops_or_plain.py",
    "tests/planner/test_exchange_costs.py",
]


@pytest.mark.slow
def test_products_of_cases_find_it_without_a_list_that_is_edited():
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.row_topk"]
    command += ["-o", "addopts=--import-mode=importlib", "--collect-only", "-q", *PRODUCTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout
    for file in PRODUCTS:
        assert any("row_topk" in line for line in found.splitlines() if line.startswith(file)), file


@pytest.mark.parametrize("communicator", ["allgather", "broadcast"])
@on_ranks()
def test_ranks_exchange_by_it(communicator):
    from tests.support.own_parts import registered
    from tests.support.row_topk import RowTopK

    with registered(RowTopK):
        shapes = {"matrix": (30, 20), "vector": (700,)}
        model = Given(shapes)
        optimizer = distributed(model, RowTopK(), memory="none", communicator=communicator)
        given = [made_up(shapes, 0, rank) for rank in range(grace.size())]
        model.backward(given[grace.rank()])
        optimizer.step()
        mean = torch.zeros(30, 20)
        for gradients in given:
            x = torch.as_tensor(gradients["matrix"])
            rows, columns = torch.arange(30), x.abs().argmax(1)
            mean[rows, columns] += x[rows, columns] / grace.size()
        assert (dict(model.named_parameters())["matrix"].grad - mean).abs().max() < 1e-6
