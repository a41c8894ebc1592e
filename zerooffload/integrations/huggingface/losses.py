"""The loss that language models are trained with."""

from __future__ import annotations

import torch
from torch import nn


def next_token_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of `targets` given `inputs`, both `[batch, sequence]`; 0-dim, fp32."""
    device = next(model.parameters()).device
    logits = model(input_ids=inputs.to(device)).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
