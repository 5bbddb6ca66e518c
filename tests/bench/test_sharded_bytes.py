"""``python -m benchmarks.sharded_bytes``."""

from benchmarks import sharded_bytes
from grace.bench.workloads.torch_tasks import CharacterGPT
from tests.support.pools import on_ranks


@on_ranks(2)
def test_rows_have_losses_and_the_bytes_of_the_methods():
    rows = {row["name"]: row for row in sharded_bytes.measure(CharacterGPT(1), steps=4, seeds=[0])}
    assert list(rows) == list(sharded_bytes.CONTESTANTS)
    sent = {name: row["weight_bytes"] / rows["FSDP2"]["weight_bytes"] for name, row in rows.items()}
    assert 0.25 < sent["8 bits"] < 0.35  # and scales, of each parameter's blocks
    assert 0.125 < sent["4 bits"] < sent["8 bits"] - 0.1
    whole = {name: row["bytes"] - row["weight_bytes"] for name, row in rows.items()}
    assert whole["8 bits"] == whole["FSDP2"]
    assert 0.125 < whole["8 bits, gradients of 4"] / whole["FSDP2"] < 0.3
    assert all(2 < row["loss_0"] < 6 for row in rows.values())
    return sorted((name, row["loss_0"]) for name, row in rows.items())
