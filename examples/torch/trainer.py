"""Train a small GPT on Python source with the Trainer of Hugging Face's transformers. Two lines are Grace's: `# +`.

torchrun --nproc-per-node 2 examples/torch/trainer.py --compressor "block(bits=4)"
torchrun --nproc-per-node 2 examples/torch/trainer.py --resume       # goes on from the last checkpoint
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from grace.integrations.transformers import GraceCallback  # +

parser = argparse.ArgumentParser(description="Train a small GPT under Hugging Face's Trainer.")
parser.add_argument("--compressor", default="block(bits=4)", help="see `grace list` (default: %(default)s)")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--output", default="out/trainer", help="folder of checkpoints (default: %(default)s)")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
args = parser.parse_args()

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
pieces = [{"input_ids": piece, "labels": piece} for piece in text.split(64)[:-1]]

set_seed(0)
ends = {"bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, **ends))
settings = TrainingArguments(
    args.output,
    max_steps=args.steps,
    save_steps=max(1, args.steps // 2),
    logging_steps=max(1, args.steps // 4),
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    ddp_find_unused_parameters=False,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)
callbacks = [GraceCallback(args.compressor)]  # +
trainer = Trainer(model, settings, train_dataset=pieces, callbacks=callbacks)
trainer.train(resume_from_checkpoint=args.resume)

if trainer.is_world_process_zero():
    logs = trainer.state.log_history
    loss = [entry["loss"] for entry in logs if "loss" in entry][-1]
    ratios = [entry["grace_ratio"] for entry in logs if "grace_ratio" in entry] or [1]
    print(f"loss {loss:.2f} after {trainer.state.global_step} steps, {ratios[-1]:.0f} times fewer bytes")
