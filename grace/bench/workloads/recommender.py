"""A small recommender task: made-up clicks of users on items, two embedding tables and an MLP."""

import numpy as np

from grace.bench.workloads.task import LabelledTask

USERS, ITEMS, FACTORS = 1000, 500, 2
TRAINING, TEST = 200_000, 10_000
"""Clicks, or their absence."""
EMBEDDING, HIDDEN, SPREAD = 16, 64, 0.1
"""Width of both tables and of the MLP's hidden layer (27,201 parameters); standard deviation of embeddings at first."""


class Recommender(LabelledTask):
    """Clicks drawn with p = sigmoid(2.25 / sqrt(2) <u, v> + b), u of 1,000 users, v and b of 500 items, all Gaussian.

    Few items are seen often (Zipf's law with exponent 0.8). The MLP gets both embeddings and their product; gradients
    of tables are dense, since a batch touches about half of the rows. The quality is the mean log loss in nats on
    held-out pairs: .693 is chance, and .441 that of p itself.
    """

    about = "made-up clicks, two embeddings and an MLP"
    metric = "log loss"
    higher_is_better = False
    target = 0.5
    optimizer, lr, adamw_lr, warmup = "adamw", 3.0, 1e-2, 0.1
    epochs, quick_epochs, batch = 4, 2, 512

    def __init__(self) -> None:
        random, count = np.random.default_rng(0), TRAINING + TEST
        of_users, of_items = random.normal(size=(USERS, FACTORS)), random.normal(size=(ITEMS, FACTORS))
        bias = random.normal(size=ITEMS)
        seen = 1 / np.arange(1, ITEMS + 1) ** 0.8
        users, items = random.integers(USERS, size=count), random.choice(ITEMS, count, p=seen / seen.sum())
        logits = 2.25 / FACTORS**0.5 * (of_users[users] * of_items[items]).sum(1) + bias[items]
        clicks = (random.random(count) < 1 / (1 + np.exp(-logits))).astype("float32")
        pairs = np.stack([users, items], 1)
        self.train_x, self.test_x = pairs[:TRAINING], pairs[TRAINING:]
        self.train_y, self.test_y = clicks[:TRAINING], clicks[TRAINING:]
