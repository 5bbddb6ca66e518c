"""Collectives of NCCL on a stream of their own, in one process; tests/backends/test_streams.py simulates the device."""

import pytest
import torch
import torch.distributed as dist

from grace.backends.torch_distributed import TorchBackend

pytestmark = pytest.mark.device


def test_a_gpu_sends_what_was_computed_before_and_decodes_what_has_come(gpu, tmp_path):
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "ranks"), 1), rank=0, world_size=1)
    try:
        backend = TorchBackend()
        for step in range(20):
            x = torch.zeros(1 << 22, device="cuda")
            torch.cuda._sleep(10_000_000)  # so that the host is ahead
            handles = [backend.allreduce(x.add_(step)), backend.allgather(x * 2), backend.alltoall(x * 3)]
            one, (two,), (three,) = (handle.wait() for handle in handles)
            assert (one == step).all()
            assert (two == 2 * step).all()
            assert (three == 3 * step).all()
        assert backend._side_stream(x.device) is not None
    finally:
        dist.destroy_process_group()
