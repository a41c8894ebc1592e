"""Which device computes, and what there is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerooffload.accelerator.api import Accelerator
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.errors import ConfigError


@dataclass(frozen=True)
class DeviceModel:
    """What a device is.

    Attributes
    ----------
    name : str
    memory_bytes : int
        All of its memory.
    """

    name: str
    memory_bytes: int


def device_models() -> list[DeviceModel]:
    """The devices with memory of their own that ranks can compute on; none where the CPU computes."""
    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [DeviceModel(gpu.name, gpu.total_memory) for gpu in found]


def use_device_of(local_rank: int) -> None:
    """Let this process compute on the CUDA device of its number on this machine, where there are any.

    With one that is visible nothing is chosen: whoever starts the ranks may have given each its own.

    Raises
    ------
    ConfigError
        If there are fewer devices.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices < 2:
        return
    if local_rank >= num_devices:
        raise ConfigError(
            f"LOCAL_RANK is {local_rank}, and this machine has {num_devices} CUDA devices: start as many ranks here"
            f" (torchrun --nproc-per-node={num_devices}), each computes on one"
        )
    torch.cuda.set_device(local_rank)


def default_accelerator() -> Accelerator:
    """The current CUDA device where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return CpuAccelerator()
    from zerooffload.accelerator.cuda import CudaAccelerator  # noqa: PLC0415 - only where there is CUDA

    return CudaAccelerator(torch.device("cuda", torch.cuda.current_device()))
