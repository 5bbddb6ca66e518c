"""Train a small network on scikit-learn's digits, with compressed gradients. Six lines are Grace's: `# +`.

torchrun --nproc-per-node 2 examples/torch/digits.py --compressor "block(bits=4)"
horovodrun -np 2 python examples/torch/digits.py       # with Horovod (make horovod); --gloo or --mpi
mpirun -np 2 python examples/torch/digits.py           # with Horovod or mpi4py
python examples/torch/digits.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import grace  # +

parser = argparse.ArgumentParser(description="Train on scikit-learn's digits with compressed gradients.")
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

engine = grace.init()  # +
torch.manual_seed(0)

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
train = TensorDataset(train_x, train_y)
loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train, grace.size(), grace.rank()))  # +

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=args.compressor)  # +

for epoch in range(args.epochs):
    loader.sampler.set_epoch(epoch)  # +
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
if grace.rank() == 0:  # +
    print(f"{args.compressor} on {engine.describe()}")
    print(f"test accuracy {accuracy:.1%}, {optimizer.traffic.sent_bytes:,} bytes sent by this rank")
