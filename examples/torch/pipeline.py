"""Train a small GPT with a large vocabulary in stages, which Grace cuts automatically and whose replicas
exchange compressed gradients.

torchrun --nproc-per-node 4 examples/torch/pipeline.py --stages 2 --compressor "block(bits=4)"
torchrun --nproc-per-node 3 examples/torch/pipeline.py --replicas 1 2
python examples/torch/pipeline.py --stages 1
"""

import argparse

import torch
from torch import nn

import grace
from grace.torch import Pipeline

parser = argparse.ArgumentParser(description="Train a GPT in stages, with compressed gradients.")
parser.add_argument("--stages", type=int, help="how many; searched for if left out")
parser.add_argument("--replicas", type=int, nargs="+", help="of every stage, or one number for each")
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--plan", help="a file: written if it is not there, or else read")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--vocabulary", type=int, default=2048)
args = parser.parse_args()

ROWS, LENGTH, WIDTH, LAYERS = 16, 16, 32, 2


class GPT(nn.Module):
    """Token and position embeddings, causal self-attention, and a head."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(args.vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, args.vocabulary, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = layer(y, mask, is_causal=True)
        return self.head(y)


def sentences(step, rows):
    """Return tokens, each of which follows from the one before, and the token after each."""
    draw = torch.Generator().manual_seed(step)
    first = torch.randint(0, 64, (rows, 1), generator=draw)
    x = (first + 7 * torch.arange(LENGTH + 1)) % 64
    return x[:, :-1], x[:, 1:]


def cross_entropy(logits, targets):
    """Return the cross-entropy of the next tokens, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


grace.init()
torch.manual_seed(0)
replicas = args.replicas[0] if args.replicas and len(args.replicas) == 1 else args.replicas
engine = Pipeline(
    GPT(),
    sentences(0, ROWS)[0],
    cross_entropy,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    compressor=args.compressor,
    microbatches=args.microbatches,
    stages=args.stages,
    replicas=replicas,
    plan=args.plan,
)
if grace.rank() == 0:
    print(engine.plan)
for step in range(args.steps):
    x, y = sentences(step, ROWS * engine.replicas)
    if engine.inputs == "replica":  # this replica's rows; or else all ranks give the whole batch
        x, y = (one[ROWS * engine.replica :][:ROWS] for one in (x, y))
    else:
        x, y = sentences(step, ROWS)
    loss = engine.step(x, y)
if grace.rank() == 0:
    print(f"loss {loss.item():.3f} nats after {args.steps} steps")
state = engine.state_dict()  # the whole model's, for a program without Grace
if grace.rank() == 0:
    GPT().load_state_dict(state)
