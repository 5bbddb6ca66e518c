"""Steps that are CUDA graphs train as eager ones do; tests/in_torch/test_capturing.py has all that needs no GPU."""

import pytest
import torch
import torch.distributed as dist

import grace
from grace.torch.cuda_graphs import capture

pytestmark = pytest.mark.device
METHODS = ["none", "qsgd", "topk(ratio=0.1)", "randomk(ratio=0.1)", "powersgd(rank=2)"]


@pytest.fixture(params=["local", "nccl"])
def alone(request, gpu):
    """One rank, by itself or in a process group."""
    if request.param == "nccl":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    grace.init("torch" if request.param == "nccl" else "local")
    yield
    grace.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(method, captured):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32).cuda()
    optimizer = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, method)
    batch = torch.zeros(16, 64, device="cuda")

    def step():
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    def made():
        optimizer.zero_grad()
        step()
        optimizer.step()

    batch.normal_(generator=torch.Generator("cuda").manual_seed(1))
    if captured:
        made = capture(optimizer, step)  # three steps
    else:
        [made() for _ in range(3)]
    for number in range(4):
        batch.normal_(generator=torch.Generator("cuda").manual_seed(number))
        made()
    assert optimizer._grace.context.step == 7
    optimizer.close()
    return model.weight.detach().clone()


@pytest.mark.parametrize("method", METHODS)
def test_replays_train_as_steps_do(alone, method):
    torch.testing.assert_close(trained(method, True), trained(method, False))
