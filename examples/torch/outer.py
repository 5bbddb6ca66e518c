"""Train on scikit-learn's digits with local steps and an outer optimizer (DiLoCo). Nine lines are Grace's: `# +`.

torchrun --nproc-per-node 2 examples/torch/outer.py --compressor "block(bits=4)" --period 10
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import grace  # +

parser = argparse.ArgumentParser(description="Train alone, and exchange every few steps how far ranks have drifted.")
parser.add_argument("--compressor", default="block(bits=4)", help="of drifts; see `grace list` (default: %(default)s)")
parser.add_argument("--period", type=int, default=10, help="steps between two rounds (default: %(default)s)")
parser.add_argument("--outer", default="nesterov(lr=0.7, momentum=0.6)", help="outer optimizer (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()

engine = grace.init()  # +
torch.manual_seed(0)

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
train = TensorDataset(train_x, train_y)
loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train, grace.size(), grace.rank()))  # +

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
how = {"compressor": args.compressor, "outer": args.outer, "period": args.period}  # +
optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), **how)  # +

for epoch in range(args.epochs):
    loader.sampler.set_epoch(epoch)  # +
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

optimizer.flush()  # + a last round, after which all ranks have equal parameters
with torch.no_grad(), optimizer.anchor():  # + evaluate what all ranks share
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
if grace.rank() == 0:  # +
    print(f"{args.compressor} on {engine.describe()}")
    print(f"test accuracy {accuracy:.1%}, {optimizer.traffic.sent_bytes:,} bytes sent by this rank")
