"""What the optimizer keeps of each parameter, beside the parameter itself.

[Note: master weights]
The parameter lives in its compute dtype. fp32: it is the master. bf16: the master's upper half, rounded with ties away
from zero, so that 16 further bits give the fp32 master back exactly:
`master bits = (param << 16) + int16 remainder`. (With ties to even, 65,537 masters would share one even bf16 value.)
"""

from __future__ import annotations

import torch

from zerooffload.errors import ConfigError
from zerooffload.tiers import Part

REMAINDER = Part("remainder", torch.int16)
EXP_AVG = Part("exp_avg", torch.float32)
EXP_AVG_SQ = Part("exp_avg_sq", torch.float32)

_PARTS = {
    torch.float32: (EXP_AVG, EXP_AVG_SQ),
    torch.bfloat16: (REMAINDER, EXP_AVG, EXP_AVG_SQ),
}


def optimizer_parts(param_dtype: torch.dtype) -> tuple[Part, ...]:
    """The optimizer's record for parameters of that dtype.

    Raises
    ------
    ConfigError
        If parameters of that dtype cannot be trained.
    """
    if param_dtype not in _PARTS:
        trainable = ", ".join(str(dtype).removeprefix("torch.") for dtype in _PARTS)
        raise ConfigError(
            f"parameters of {param_dtype} cannot be trained: convert them to one of {trainable}, or freeze them"
        )
    return _PARTS[param_dtype]
