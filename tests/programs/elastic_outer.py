"""Elastic training in outer rounds of eight iterations: one of three ranks dies at step 12, and a new one joins after
step 30. Started by horovodrun; see test_elastic.py.

Usage: elastic_outer.py FOLDER; FOLDER/hosts is what the discovery script prints, FOLDER/log what happened.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import grace
from tests.support.training import digest


def main(folder: Path) -> None:
    import horovod.torch as hvd

    torch.set_num_threads(1)
    grace.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 10))
    optimizer = grace.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model, "topk(ratio=0.1)", outer="nesterov", period=8
    )

    def say(what: str, step: int) -> None:
        """Log digests of this rank's own values (weights and buffers, memories, the state of AdamW), and of what the
        ranks share."""
        own = [value.detach() for value in model.state_dict().values()]
        states = optimizer._grace.runner.state()
        with optimizer.anchor():
            at_anchor = [p.detach() for p in model.parameters()]
            anchors = digest(at_anchor)
        weights = digest([p.detach() for p in model.parameters()])
        inner = digest(torch.optim.Optimizer.state_dict(optimizer)["state"])
        words = [
            what,
            os.getpid(),
            grace.size(),
            grace.rank(),
            step,
            digest(own),
            digest(states.get("memory", {})),
            inner,
            weights,
        ]
        words += [anchors, digest(states.get("outer", {}))]
        with (folder / "log").open("a") as log:
            log.write(" ".join(map(str, words)) + "\n")

    @hvd.elastic.run
    def train(state) -> None:
        say("start", state.step)
        while state.step < 40:
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * state.step + grace.rank()))
            optimizer.zero_grad()
            (model(x) - x[:, :10]).square().mean().backward()
            optimizer.step()
            state.step += 1
            if state.step == 12 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
                os.kill(os.getpid(), signal.SIGKILL)
            if grace.rank() == 0 and state.step == 30:
                (folder / "hosts").write_text("localhost:3\n")
            if state.step % 5 == 0:
                say("commit", state.step)
                state.commit()
            while state.step == 30 and grace.size() < 3:  # the launcher looks for hosts every second
                time.sleep(0.1)
                state.commit()
        optimizer.flush()
        say("end", state.step)

    train(hvd.elastic.TorchState(optimizer=optimizer, model=model, step=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
