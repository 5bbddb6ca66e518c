"""Train a small network on scikit-learn's digits with Accelerate. Two lines are Grace's: `# +`.

torchrun --nproc-per-node 2 examples/torch/accelerate_digits.py --compressor "block(bits=4)"
accelerate launch --multi_gpu --num_processes 2 examples/torch/accelerate_digits.py      # on GPUs
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from grace.integrations.accelerate import metrics, prepare  # +

parser = argparse.ArgumentParser(description="Train on scikit-learn's digits in a loop of Accelerate's.")
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--output", default="out/accelerate", help="folder of the last state (default: %(default)s)")
parser.add_argument("--resume", action="store_true", help="go on from there")
args = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
loader = DataLoader(TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)), 16, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = prepare(accelerator, model, optimizer, loader, compressor=args.compressor)  # +
if args.resume:
    accelerator.load_state(args.output)

step = 0
while step < args.steps:
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                step += 1
            optimizer.step()
            optimizer.zero_grad()
        if step == args.steps:
            break
accelerator.save_state(args.output)
loss, ratio = accelerator.reduce(loss.detach(), "mean"), metrics(model).get("grace_ratio", 1)
accelerator.print(f"loss {loss:.2f} after {step} steps, {ratio:.0f} times fewer bytes")
