"""Two ranks on one GPU, over gloo: models that lie on the CPU and on the GPU, and autocast with a GradScaler."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import grace

pytestmark = pytest.mark.device
METHODS = ["none", "block(bits=4)"]
STEPS, OVERFLOWS_AT = (3, 1) if os.environ.get("TRITON_INTERPRET") == "1" else (8, 5)
RANKS = 2


class OnBoth(torch.nn.Module):
    """Words looked up on the CPU, and layers on ``device``."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(50, 32)
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(device)
        self.device = device

    def forward(self, words):
        return self.layers(self.words(words).to(self.device))


def loss_on_both(model, step, ranks):
    """The loss of some ranks' examples."""
    drawn = torch.Generator().manual_seed(step)
    words, wanted = torch.randint(50, (RANKS, 16), generator=drawn), torch.randn(RANKS, 16, 8, generator=drawn)
    return (model(words[ranks].flatten()) - wanted[ranks].flatten(0, 1).to(model.device)).square().mean()


def trained_on_both(method, device, ranks, own):
    """The parameters after some steps; without Grace if ``method`` is None."""
    model = OnBoth(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if method is not None:
        optimizer = grace.DistributedOptimizer(optimizer, model, method)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_on_both(model, step, own if method else ranks).backward()
        optimizer.step()
    return [p.detach().cpu().clone() for p in model.parameters()]


def trained_with_scaler(method, device, rank):
    """The parameters, scales and numbers of changed parameters of each step; one rank overflows in one of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = grace.DistributedOptimizer(plain, model, method, grad_scaler=scaler)
    scales, moved = [], []
    for step in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(RANKS * step + rank)).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = model(x).float().square().mean()
        if step == OVERFLOWS_AT and rank == 1:
            loss = loss * 1e30
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(sum(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)))
    return [p.detach().cpu().clone() for p in model.parameters()], scales, moved


def rank_main(rank, device, folder):
    """One rank: run every case, and write what came of it."""
    if device == "cpu":
        from tools.device.place import prepare

        prepare()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks", RANKS), rank=rank, world_size=RANKS)
    grace.init("torch")
    found = {}
    for method in METHODS:
        found["both", method] = trained_on_both(method, device, [0, 1], [rank])
        found["scaler", method] = trained_with_scaler(method, device, rank)
    found["alone"] = trained_on_both(None, device, [0, 1], [rank])
    grace.shutdown()
    dist.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return each rank's results, by case."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    folder = tmp_path_factory.mktemp("two_ranks")
    torch.multiprocessing.spawn(rank_main, ("cpu" if interpreted else "cuda", str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("method", METHODS)
def test_a_model_on_cpu_and_gpu_stays_alike_on_all_ranks(found, method):
    first, second = (one["both", method] for one in found)
    assert all(map(torch.equal, first, second))
    if method == "none":
        for value, expected in zip(first, found[0]["alone"], strict=True):
            torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_autocast_and_a_grad_scaler_skip_one_ranks_overflow_on_all(found, method):
    (first, scales, moved), (second, other_scales, other_moved) = (one["scaler", method] for one in found)
    assert all(map(torch.equal, first, second))
    assert scales == other_scales
    assert scales[OVERFLOWS_AT - 1 : OVERFLOWS_AT + 1] == [2.0**10, 2.0**9]
    assert moved == other_moved
    assert [step for step, number in enumerate(moved) if number == 0] == [OVERFLOWS_AT]
