"""The models of whole steps, where they are measured: ``module:function`` of ``grace bench step``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import grace
from grace.bench.workloads import models
from tools.device.place import DEVICE, INTERPRETED

Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor], int]
SEQUENCES, LENGTH = 4, 512
IMAGES, SIZE = 32, 224


def gpt2() -> Made:
    """GPT-2 small as transformers has it, 124.4 M parameters that nobody has trained, and 4 sequences of 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 11, "n_positions": 8}
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **(tiny if INTERPRETED else {}))
    length = min(LENGTH, config.n_positions - 1)
    made = torch.Generator().manual_seed(grace.rank())
    text = torch.randint(config.vocab_size, (SEQUENCES, length + 1), generator=made).to(DEVICE)

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(input_ids=text[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    return GPT2LMHeadModel(config).to(DEVICE), loss, SEQUENCES


def resnet50() -> Made:
    """ResNet-50 of ``grace bench step``, and 32 images of 3 x 224 x 224; two small layers stand for it where kernels
    are interpreted."""
    if INTERPRETED:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(grace.rank()))
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))
        return model, lambda model: model(x).square().mean(), 2
    work = models.resnet50(grace.rank(), images=IMAGES, size=SIZE)
    return work.model.to(DEVICE), work.loss, work.samples
