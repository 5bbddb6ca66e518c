"""Outer rounds whose anchors and momenta lie on the CPU have the bits of those on the GPU."""

import pytest
import torch

import grace

pytestmark = pytest.mark.device


def trained(spec, compressor, restart):
    """The parameters, anchors and momenta after some rounds; with a restart in the middle of a period."""

    def made():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 512)]
        model = torch.nn.Sequential(*layers).cuda()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, grace.DistributedOptimizer(inner, model, compressor, outer=spec, period=3)

    model, optimizer = made()
    for step in range(10):
        if restart and step == 4:
            state = optimizer.full_state_dict()
            optimizer.close()
            model, optimizer = made()
            optimizer.load_state_dict(state)
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        torch.cuda._sleep(5_000_000)  # so that the host is ahead of the gradients
        optimizer.step()
    with optimizer.anchor():
        at_anchor = [value.cpu().clone() for value in model.state_dict().values()]
    rounds = optimizer._grace.runner.outer_rounds
    kept = [*rounds.anchors.state.values(), *rounds.optimizers[0].state.values()]
    devices = {value.device.type for value in kept}
    own = [value.cpu().clone() for value in model.state_dict().values()]
    optimizer.close()
    return [*own, *at_anchor, *(value.cpu() for value in kept)], devices


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)"])
@pytest.mark.parametrize("restart", [False, True])
def test_anchors_on_the_cpu_give_the_bits_of_those_on_the_gpu(gpu, compressor, restart):
    grace.init("local")
    try:
        wanted, here = trained("nesterov(lr=0.7, momentum=0.6)", compressor, restart)
        found, there = trained("nesterov(lr=0.7, momentum=0.6, offload=True)", compressor, restart)
    finally:
        grace.shutdown()
    assert (here, there) == ({"cuda"}, {"cpu"})
    assert len(found) == len(wanted)
    for value, expected in zip(found, wanted, strict=True):
        assert torch.equal(value, expected)
