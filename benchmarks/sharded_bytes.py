"""Losses and bytes of FSDP2 with compressed collectives: ``torchrun --nproc-per-node 2 -m benchmarks.sharded_bytes``.

Trains the character GPT of ``grace bench train``, each block sharded by itself, by AdamW, and measures the loss on
held-out text, with exact weights. Bytes are those that a rank sends in a step: of weights (gathers in forward and
backward), and of weights and gradients together. Rows go into ``benchmarks/results/sharded.json``, and a Markdown table
is printed.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import grace
from grace.bench.common.results import machine, versions
from grace.bench.workloads.torch_tasks import ADAMW_BETA2, CharacterGPT
from grace.core.atomic_files import atomic_write

OUT = Path("benchmarks/results/sharded.json")
FOUR = "block(bits=4, hadamard=32)"
CONTESTANTS: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "FSDP2": (None, None),
    "8 bits": ({"block": "block(bits=8)"}, None),
    "8 bits, gradients of 4": ({"block": "block(bits=8)"}, FOUR),
    "4 bits": ({"block": "block(bits=4)"}, None),
    "differences of 4 bits": ({"block": "block(bits=4)", "delta": True}, None),
}
"""Arguments of ``compress_all_gather``, and the method of ``compress_reduce_scatter``; None leaves torch's own."""
BATCH = 16
"""Windows of text in a step of all ranks together."""


class Counted:
    """FSDP2's own collective, with the bytes that a rank sends by it.

    Args:
        former: the collective.
        scatters: True if each rank receives a part of its input's size.
    """

    def __init__(self, former: Any, scatters: bool):
        self.former = former
        self.allocate = former.allocate
        self.scatters = scatters
        self.sent_bytes = 0

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> Any:
        self.sent_bytes += (group.size() - 1) * (output_tensor if self.scatters else input_tensor).nbytes
        return self.former(output_tensor, input_tensor, group, **options)


def counted(model: Any, scatters: bool) -> list[Counted]:
    """Count what one of the collectives of a sharded model sends."""
    found = []
    for module in (*model.blocks, model):
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        made = Counted(group._reduce_scatter_comm if scatters else group._all_gather_comm, scatters)
        (module.set_custom_reduce_scatter if scatters else module.set_custom_all_gather)(made)
        found.append(made)
    return found


def train(task: CharacterGPT, name: str, seed: int, steps: int) -> tuple[float, float, float]:
    """Train a contestant.

    Returns:
        the loss on held-out text; and for each step the bytes of weights, and of gradients, that this rank sent.
    """
    weights, gradients = CONTESTANTS[name]
    model: Any = task.network(seed)
    for module in (*model.blocks, model):
        fully_shard(module)
    gathers: list[Any] = (
        counted(model, scatters=False) if weights is None else [grace.torch.compress_all_gather(model, **weights)]
    )
    scatters: list[Any] = (
        counted(model, scatters=True) if gradients is None else [grace.torch.compress_reduce_scatter(model, gradients)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate("adamw"), betas=(0.9, ADAMW_BETA2))
    rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (task.warmup * steps)))
    order = task.order(len(task.train_x), seed)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        places = torch.arange(step * BATCH + rank, (step + 1) * BATCH, ranks)
        optimizer.zero_grad()
        task.loss(model, order[places % len(order)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        rising.step()
    gathered, scattered = (sum(one.sent_bytes for one in each) / steps for each in (gathers, scatters))
    model.eval()  # Grace leaves the weights exact
    return task.quality(model), gathered, scattered


def measure(task: CharacterGPT, steps: int, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Train all contestants; yield the row of each."""
    for name in CONTESTANTS:
        runs = [train(task, name, seed, steps) for seed in seeds]
        losses = {f"loss_{seed}": loss for seed, (loss, _, _) in zip(seeds, runs, strict=True)}
        _, gathered, scattered = runs[0]
        yield {"name": name, **losses, "weight_bytes": gathered, "bytes": gathered + scattered}


def main() -> None:
    """Train, and print the table, a line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help=f"(default: {OUT})")
    parser.add_argument("--steps", type=int, default=300, help="(default: 300)")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1], help="(default: 0 1)")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        print("| sent | loss | bytes of weights | all bytes |")
        print("| --- | --- | --- | --- |", flush=True)
    task = CharacterGPT()
    settings = {"task": task.about, "steps": given.steps, "ranks": dist.get_world_size(), "batch": BATCH}
    facts = {"settings": settings, "machine": machine(), "versions": versions()}
    rows: list[dict[str, Any]] = []
    for row in measure(task, given.steps, given.seeds):
        rows.append(row)
        losses = ", ".join(f"{row[f'loss_{seed}']:.3f}" for seed in given.seeds)
        of_plain = [f"{row[key] / rows[0][key]:.3f}" for key in ("weight_bytes", "bytes")]
        if first:
            with atomic_write(given.out) as draft:
                draft.write_text(json.dumps({**facts, "rows": rows}) + "\n")
            print(f"| {row['name']} | {losses} | {' | '.join(of_plain)} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
