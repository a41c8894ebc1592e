"""What the optimizer keeps of each parameter, beside the parameter itself.

[Note: master weights]
The parameter lives in its compute dtype. fp32: it is the master. bf16: the master's upper half, rounded with ties away
from zero, so that 16 further bits give the fp32 master back exactly:
`master bits = (param << 16) + int16 remainder`. (With ties to even, 65,537 masters would share one even bf16 value.)
fp16: the record holds the fp32 master, of which the parameter is the rounded copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerooffload.config import Algorithm, MomentFormat
from zerooffload.errors import ConfigError
from zerooffload.optim.low_bits import SCALE_BLOCK_NUMEL
from zerooffload.optim.rules import RULES, Moment
from zerooffload.tiers import Part, dtype_name

REMAINDER = Part("remainder", torch.int16)
MASTER = Part("master", torch.float32)

_MASTER_PARTS = {torch.float32: (), torch.bfloat16: (REMAINDER,), torch.float16: (MASTER,)}


@dataclass(frozen=True)
class OptimizerStates:
    """Which states each trained element has.

    Attributes
    ----------
    algorithm : Algorithm
        A name in `RULES`.
    moments : MomentFormat
        In which format they are kept.
    """

    algorithm: Algorithm = "adamw"
    moments: MomentFormat = "fp32"

    @property
    def block_numel(self) -> int:
        """Elements that must stay together: parameters start on multiples of it."""
        return SCALE_BLOCK_NUMEL if self.moments == "8bit" else 1

    def parts(self, param_dtype: torch.dtype) -> tuple[Part, ...]:
        """The optimizer's record for parameters of that dtype.

        Raises
        ------
        ConfigError
            If parameters of that dtype cannot be trained.
        """
        if param_dtype not in _MASTER_PARTS:
            trainable = ", ".join(dtype_name(dtype) for dtype in _MASTER_PARTS)
            raise ConfigError(
                f"parameters of {param_dtype} cannot be trained: convert them to one of {trainable}, or freeze them"
            )
        moments = [part for moment in RULES[self.algorithm].moments for part in self._moment_parts(moment)]
        return (*_MASTER_PARTS[param_dtype], *moments)

    def _moment_parts(self, moment: Moment) -> tuple[Part, ...]:
        match self.moments:
            case "fp32":
                return (Part(moment.name, torch.float32),)
            case "bf16":
                return (Part(moment.name, torch.bfloat16),)
            case "8bit":
                codes = Part(moment.name, torch.uint8)
                return (codes, Part(exponents_name(moment.name), torch.uint8, SCALE_BLOCK_NUMEL))


def exponents_name(moment: str) -> str:
    """The part of a record that holds the scales of an 8-bit moment."""
    return f"{moment}_exponents"
