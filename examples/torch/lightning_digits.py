"""Train a small network on scikit-learn's digits with Lightning. Two lines are Grace's: `# +`.

torchrun --nproc-per-node 2 examples/torch/lightning_digits.py --devices 2 --compressor "block(bits=4)"
python examples/torch/lightning_digits.py --devices 2        # Lightning starts the other rank
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from grace.integrations.lightning import GraceCallback  # +

parser = argparse.ArgumentParser(description="Train on scikit-learn's digits under Lightning.")
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--devices", type=int, default=1, help="ranks on this machine (default: %(default)s)")
parser.add_argument("--output", default="out/lightning", help="folder of checkpoints and logs (default: %(default)s)")
parser.add_argument("--resume", help="a checkpoint to go on from")
args = parser.parse_args()


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


pl.seed_everything(0, verbose=False)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
trainer = pl.Trainer(
    max_steps=args.steps,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=args.devices,
    strategy="ddp" if args.devices > 1 else "auto",
    callbacks=[GraceCallback(args.compressor)],  # +
    logger=CSVLogger(args.output),
    log_every_n_steps=max(1, args.steps // 4),
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path=args.resume)

if trainer.is_global_zero:
    ratio = trainer.callback_metrics.get("grace_ratio", 1)
    loss = trainer.callback_metrics["loss"]
    print(f"loss {loss:.2f} after {trainer.global_step} steps, {ratio:.0f} times fewer bytes")
