"""Train on scikit-learn's digits, and continue after a rank has died.

torchrun starts all ranks anew. They continue from the last checkpoint, which holds what compression had left out.

torchrun --nproc-per-node 2 --max-restarts 3 examples/torch/elastic.py --checkpoint digits.pt
torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
    examples/torch/elastic.py                     # on each of two machines; if one fails, the other continues
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import grace

parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, and survive the death of a rank.")
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--period", type=int, default=0, help="train alone for so many steps between two exchanges")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), help="seen by rank 0 (default: %(default)s)")
args = parser.parse_args()

grace.init()
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data, grace.size(), grace.rank()))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
outer = {"outer": "nesterov(lr=0.7, momentum=0.6)", "period": args.period} if args.period else {}
optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=args.compressor, **outer)

start = 0
saved = grace.from_root(lambda: torch.load(args.checkpoint, weights_only=True) if args.checkpoint.exists() else None)
if saved is not None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # on another number of ranks, too
    start = saved["epochs"]
if grace.rank() == 0:
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(f"{grace.size()} ranks begin with epoch {start}, after {restarts} restarts", flush=True)

for epoch in range(start, args.epochs):
    loader.sampler.set_epoch(epoch)  # the order of samples is the epoch's, so that it is the same after a restart
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    with optimizer.anchor():  # the parameters that all ranks share, also where each trains alone
        state = {"epochs": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.full_state_dict()}
        grace.save_from_root(args.checkpoint, lambda path, state=state: torch.save(state, path))  # or the one before

if grace.rank() == 0:
    print(f"{args.epochs} epochs, loss {loss.item():.3f}")
