"""Train a Keras model on Keras's torch backend by Keras's own fit and a torch optimizer. Lines of Grace: `# +`.

torchrun --nproc-per-node 2 examples/torch/keras_on_torch.py --compressor "block(bits=4)"
python examples/torch/keras_on_torch.py
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from sklearn.datasets import load_digits

import grace  # +


class Classifier(keras.Sequential):
    """The train_step of https://keras.io/guides/custom_train_step_in_torch, with a torch optimizer."""

    steps_by: torch.optim.Optimizer

    def train_step(self, data):
        """Make one step of fit."""
        images, labels = data
        self.steps_by.zero_grad()
        outputs = self(images, training=True)
        loss = self.compute_loss(images, labels, outputs)
        loss.backward()
        self.steps_by.step()
        for metric in self.metrics:
            metric.update_state(*([loss.detach()] if metric.name == "loss" else [labels, outputs.detach()]))
        return {metric.name: metric.result() for metric in self.metrics}


parser = argparse.ArgumentParser(description="Train a Keras model on torch with compressed gradients.")
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

engine = grace.init("torch" if "RANK" in os.environ else "local")  # +
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
steps = len(x) // (32 * grace.size())
mine = slice(grace.rank(), 32 * grace.size() * steps, grace.size())  # as many on every rank

model = Classifier([keras.Input([64]), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model.steps_by = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=args.compressor)  # +
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(x[mine] / 16, y[mine], batch_size=32, epochs=args.epochs, shuffle=False, verbose=0)

if grace.rank() == 0:
    print(f"{args.compressor} on {engine.describe()}")
    print(f"accuracy {history.history['accuracy'][-1]:.1%}, {model.steps_by.traffic.sent_bytes:,} bytes sent")
