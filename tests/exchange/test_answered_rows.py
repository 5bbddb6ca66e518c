"""Rows of sparse gradients over a destination: what is compressed on the way back is decoded where it belongs."""

import pytest
import torch

import grace

WIDTH = 40


def answered(compressor, staleness, steps=6):
    """The embedding's mean gradients of some steps, dense; rank r has the rows 0 .. 2 + r, of values that say where
    they are, and which step they are of, the same on all ranks."""
    model = torch.nn.Embedding(6, WIDTH, sparse=True)
    communicator = f"reduce_broadcast(destination=1, staleness={staleness})"
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model, compressor, "none", communicator
    )
    places = torch.arange(6 * WIDTH).view(6, WIDTH) + 1.0
    means = []
    for step in range(steps):
        optimizer.zero_grad()
        rows = torch.arange(3 + grace.rank())
        (model(rows) * (places[rows] + 1000 * step)).sum().backward()
        optimizer.step()
        means.append(torch.zeros(6, WIDTH) if model.weight.grad is None else model.weight.grad.to_dense())
    return torch.stack(means)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("compressor", ["randomk(ratio=0.4)", "topk(ratio=0.4)", "qsgd"])
def test_answers_of_rows_are_decoded_as_they_were_encoded(two_ranks, compressor, staleness):
    first, second = two_ranks.run(answered, compressor, staleness)
    assert torch.equal(first, second)
    places = torch.arange(6 * WIDTH).view(6, WIDTH) + 1.0
    for step in range(staleness, 6):
        gradient = places + 1000 * (step - staleness)
        common, alone, nobodys = first[step, :3], first[step, 3:4], first[step, 4:]
        assert not nobodys.any()
        assert (common != 0).any()
        assert (alone != 0).any()
        if compressor == "qsgd":
            continue
        # two draws of positions: a place holds nothing, half of its gradient or all of it, and nobody else's
        for mean, true in ((common, gradient[:3]), (alone, gradient[3:4])):
            assert ((mean == 0) | (mean == true / 2) | (mean == true)).all()
        assert len({first[step].ne(0).numpy().tobytes() for step in range(staleness, 6)}) > 1 or "topk" in compressor
