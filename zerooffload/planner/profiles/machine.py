"""How fast a machine is, as measured or as written down by hand, in a file.

Rates are bytes or operations a second. What `zerooffload calibrate` writes is JSON; by hand TOML may be easier:

    name = "4x4090, 128 GB, two drives"

    [device]
    count = 4
    memory = "24GB"
    matmul_flops = { bf16 = 1.5e14, fp32 = 4e13 }
    memory_bandwidth = "1000GB"
    copy_in = "25GB"
    copy_out = "25GB"

    [host]
    memory = "128GB"
    cores = 32
    memory_bandwidth = "80GB"

    [[drives]]
    path = "/mnt/a"
    read = "7GB"
    write = "5GB"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from zerooffload.config import ByteCount, describe_validation_error
from zerooffload.errors import ConfigError
from zerooffload.formats import parse_bytes
from zerooffload.machine import write_whole


def _rate(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0, allow_inf_nan=False)]
"""Bytes a second, also written "7GB"."""
Flops = Annotated[float, Field(gt=0, allow_inf_nan=False)]
DtypeName = Literal["fp32", "bf16", "fp16"]

_SECTION = ConfigDict(frozen=True, extra="forbid")


class DeviceSpeeds(BaseModel):
    """The compute devices, all alike.

    Attributes
    ----------
    count : int
        How many there are, one for each rank.
    memory : int
        Bytes that a device has; of one that computes on host memory, the host's.
    shares_host_memory : bool
        Whether it computes on host memory: nothing is copied then.
    matmul_flops : Mapping[str, float]
        Floating-point operations a second in matrix products, by dtype.
    memory_bandwidth : float
        What operations on elements read and write of its memory.
    operation_seconds : float
        What an operation takes that has nothing to do.
    copy_in, copy_out : float, optional
        From the host and to it, alone; none where nothing is copied.
    copy_both : float, optional
        Both directions together, both busy. Default: they do not hinder one another.
    gather : float, optional
        What a device gets from the others in a gather, and gives away in a reduction. Default: as `copy_in`.
    """

    model_config = _SECTION

    name: str = "unknown"
    count: Annotated[int, Field(ge=1)] = 1
    memory: ByteCount
    shares_host_memory: bool = False
    matmul_flops: dict[DtypeName, Flops]
    memory_bandwidth: Rate
    operation_seconds: Annotated[float, Field(ge=0)] = 5e-6
    copy_in: Rate | None = None
    copy_out: Rate | None = None
    copy_both: Rate | None = None
    gather: Rate | None = None

    @model_validator(mode="after")
    def _copies_have_rates(self) -> Self:
        if not self.shares_host_memory and (self.copy_in is None or self.copy_out is None):
            raise ValueError("a device with memory of its own needs copy_in and copy_out")
        if not self.matmul_flops:
            raise ValueError("matmul_flops names no dtype")
        return self


class HostSpeeds(BaseModel):
    """The CPU and its memory, of all ranks of the machine together.

    Attributes
    ----------
    memory : int
        Bytes that processes may have in all.
    cores : int
        Physical ones that they may use.
    memory_bandwidth : float
        Most that all cores read and write of memory.
    update_bandwidth : float, optional
        Bytes of memory traffic a second of the optimizer's kernel on all cores (28 bytes for each fp32 parameter of
        AdamW). Default: `memory_bandwidth`.
    first_touch_bandwidth : float, optional
        Bytes a second of memory, new from the system, that all cores touch for the first time. Default: 2.5e9 for each
        core, what zeroing 4 KiB pages takes.
    checksum_bandwidth : float, optional
        Bytes a second of which one core takes checksums. Default: 1e10.
    pinnable : int, optional
        Bytes that can be pinned for a device. Default: all.
    """

    model_config = _SECTION

    name: str = "unknown"
    memory: ByteCount
    cores: Annotated[int, Field(ge=1)]
    memory_bandwidth: Rate
    update_bandwidth: Rate | None = None
    first_touch_bandwidth: Rate | None = None
    checksum_bandwidth: Rate = 1e10
    pinnable: ByteCount | None = None


class MixedRate(BaseModel):
    """A drive while it reads and writes.

    Attributes
    ----------
    read_part : float
        Bytes read of all bytes, between 0 and 1.
    rate : float
        Bytes read and written a second, together.
    """

    model_config = _SECTION

    read_part: Annotated[float, Field(gt=0, lt=1)]
    rate: Rate


class Drive(BaseModel):
    """A path of the nvme tier.

    Attributes
    ----------
    read, write : float
        Alone.
    mixed : tuple[MixedRate, ...]
        Both together. Default: reads and writes take turns, so that their times add up.
    sustained_write : float, optional
        What is left of `write` when the drive's cache is full. Default: `write`.
    space : int, optional
        Bytes free there.
    endurance : int, optional
        Bytes that the drive bears to be written in its life.
    """

    model_config = _SECTION

    path: str
    name: str = "unknown"
    read: Rate
    write: Rate
    mixed: tuple[MixedRate, ...] = ()
    sustained_write: Rate | None = None
    space: ByteCount | None = None
    endurance: ByteCount | None = None


class MachineProfile(BaseModel):
    """All of it. Frozen.

    Attributes
    ----------
    measured : datetime, optional
        When; None if written by hand.
    num_machines : int
        Of how many machines, all alike, this is the sum.
    network : float, optional
        Bytes a second that all ranks of it together get from other machines, and give to them.
    identity : Mapping[str, str]
        What tells this machine and its software from others: empty if written by hand.
    spread : Mapping[str, float]
        Of each measured figure, by its dotted name: the distance between its quartiles, as a part of its median.
    corrections : Mapping[str, float]
        Factors on the times of resources that runs have taught.
    busy_cores : float
        That other programs kept busy while it was measured.
    """

    model_config = _SECTION

    format: Literal[1] = 1
    name: str
    measured: datetime | None = None
    identity: dict[str, str] = {}
    num_machines: Annotated[int, Field(ge=1)] = 1
    network: Rate | None = None
    device: DeviceSpeeds
    host: HostSpeeds
    drives: tuple[Drive, ...] = ()
    spread: dict[str, float] = {}
    corrections: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    busy_cores: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], whose: str = "machine profile") -> Self:
        """A profile from plain values.

        Raises
        ------
        ConfigError
            If a field is missing, unknown or wrong.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(whose, error)) from None


def read_machine(path: str | Path) -> MachineProfile:
    """The profile in a JSON or TOML file.

    Raises
    ------
    ConfigError
        If the file cannot be read, or is no profile.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the machine profile {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no machine profile: zerooffload calibrate makes one")
    return MachineProfile.from_mapping(values, f"machine profile {path}")


def write_machine(path: Path, profile: MachineProfile) -> None:
    """Write a profile as JSON, for `read_machine`; the file is there whole or as it was.

    Raises
    ------
    ConfigError
        If it cannot be written.
    """
    try:
        write_whole(path, profile.model_dump_json(indent=1, exclude_none=True) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the machine profile {path}: {error.strerror}") from error
