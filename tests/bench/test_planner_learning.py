"""``benchmarks/planner_learning.py``: its tasks are taken by ``grace bench train``, and can be learnt."""

import pytest
import torch

from grace.bench.train.train_command import TrainSettings
from grace.bench.workloads.tasks import task_class


@pytest.mark.parametrize(
    "name", [f"{momentum}{task}" for task in ("Tables", "Convolutions", "Tied", "Lora") for momentum in ("", "Plain")]
)
def test_a_few_steps_lower_the_loss(name):
    settings = TrainSettings(f"benchmarks.planner_learning:{name}", ["none", "auto"])
    assert settings.facts["metric"].endswith("loss")
    task = task_class(settings.task)()
    model = task.network(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr / 10, momentum=task.momentum)
    before = float(task.quality(model))
    for share in task.shares(1, 0, 0, 0)[:10]:
        optimizer.zero_grad()
        task.loss(model, share).backward()
        optimizer.step()
    assert float(task.quality(model)) < before
