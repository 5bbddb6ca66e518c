"""Train on scikit-learn's digits under Ray Train, with compressed gradients.

If a worker dies, Ray starts all workers anew. They continue from the last checkpoint, which holds the memories of all
workers, and end with the same weights as a run without a failure.

python examples/clusters/ray_digits.py --workers 2
python examples/clusters/ray_digits.py --workers 8 --gpu --storage /shared/runs    # on a cluster of Ray's
"""

import argparse
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import grace


def train(config):
    """Train on one worker."""
    grace.init()  # joins the process group that Ray has made
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = ray.train.torch.prepare_model(model)  # DistributedDataParallel, on this worker's device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = grace.torch.register_ddp_hook(model, compressor=config["compressor"], optimizer=optimizer)

    done = 0
    if checkpoint := ray.train.get_checkpoint():  # after a worker died, or in a run of the same name
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["grace"])
        done = saved["epochs"]

    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    sampler = DistributedSampler(data, grace.size(), grace.rank())
    device = ray.train.torch.get_device()
    for epoch in range(done, config["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        saved = {"epochs": epoch + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        saved["grace"] = state.full_state_dict()  # the memories of all: every worker calls it
        with tempfile.TemporaryDirectory() as folder:
            torch.save(saved, Path(folder, "state.pt"))
            first = Checkpoint.from_directory(folder) if grace.rank() == 0 else None
            metrics = {"loss": loss.item(), "sent_bytes": state.traffic.sent_bytes}
            ray.train.report(metrics, checkpoint=first)


def main(argv=None):
    """Start the workers and print the result."""
    parser = argparse.ArgumentParser(description="Train on digits under Ray Train, with compressed gradients.")
    parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="two or more (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each")
    parser.add_argument(
        "--storage", default="ray_results", help="a folder that all machines see (default: %(default)s)"
    )
    parser.add_argument("--name", help="of the run; one that is there goes on from its last checkpoint")
    args = parser.parse_args(argv)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"compressor": args.compressor, "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            name=args.name, storage_path=str(Path(args.storage).resolve()), failure_config=FailureConfig(max_failures=1)
        ),
    )
    metrics = trainer.fit().metrics
    print(f"{args.compressor}: loss {metrics['loss']:.3f}, {metrics['sent_bytes']:,} bytes sent by the first worker")


if __name__ == "__main__":
    main()
