"""Elastic training: a rank dies at step 12, a new one joins after step 30, and is taken away after step 40. Started by
horovodrun; see test_elastic.py.

Usage: elastic.py FOLDER; FOLDER/hosts is what the discovery script prints, FOLDER/log what happened.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import grace
from tests.support.training import digest

SLOTS = {30: 2, 40: 1}
"""Number of ranks after a step."""


def main(folder: Path) -> None:
    import horovod.torch as hvd

    def say(*words) -> None:
        with (folder / "log").open("a") as log:
            log.write(" ".join(map(str, words)) + "\n")

    def residual() -> str:
        return digest(first._grace.runner.state()["memory"])

    torch.set_num_threads(1)
    grace.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.Linear(20, 10))
    first, second = (
        grace.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9),
            [(f"{name}.{key}", p) for key, p in layer.named_parameters()],
            compressor=method,
        )
        for name, layer, method in (("one", model[0], "topk(ratio=0.1)"), ("two", model[1], "powersgd"))
    )

    @hvd.elastic.run
    def train(state) -> None:
        say("start", os.getpid(), grace.size(), state.step, residual(), state.residual)
        while state.step < 45:
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * state.step + grace.rank()))
            first.zero_grad()
            second.zero_grad()
            (model(x) - x[:, :10]).square().mean().backward()
            first.step()
            second.step()
            state.step += 1
            if state.step == 12 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
                os.kill(os.getpid(), signal.SIGKILL)
            if grace.rank() == 0 and state.step in SLOTS:
                (folder / "hosts").write_text(f"localhost:{SLOTS[state.step]}\n")
            if state.step == 35:
                factors = digest(second._grace.runner.state()["compressor"])
                weights = digest({name: p.detach() for name, p in model.named_parameters()})
                steps = [optimizer._grace.context.step for optimizer in (first, second)]
                say("together", os.getpid(), grace.size(), *steps, weights, factors)
            if state.step % 5 == 0:
                state.residual = residual()
                state.commit()
            while grace.size() != SLOTS.get(state.step, grace.size()):  # the launcher looks for hosts every second
                time.sleep(0.1)
                state.commit()
        say("end", os.getpid(), grace.size(), state.step)

    train(hvd.elastic.TorchState(model=model, optimizer=first, second=second, step=0, residual="none"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
