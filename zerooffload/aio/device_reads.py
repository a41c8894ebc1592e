"""Whether reads can go straight into a device's memory, and are faster so: tried at the start, never assumed."""

from __future__ import annotations

import errno
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from zerooffload.accelerator import Accelerator, populated_pages
from zerooffload.aio.api import Engine
from zerooffload.aio.files import create_file
from zerooffload.aio.kvikio_engine import DeviceReader, KvikioEngine
from zerooffload.formats import MIB

_PROBE_BYTES = 16 * MIB
_NUM_TURNS = 5
_FASTER = 1.05
"""Than through host memory: less is within what measurements as short as these differ by."""
_INSTALL = "kvikio is not installed (for CUDA 12: pip install kvikio-cu12)"


@dataclass(frozen=True)
class DeviceReads:
    """What came of trying.

    Attributes
    ----------
    why_not : str
        Why kvikio cannot read into the device's memory here; "" if it can.
    straight, staged : float
        Bytes a second of its reads, and of reads through host memory.
    """

    why_not: str = ""
    straight: float = 0.0
    staged: float = 0.0

    @property
    def is_faster(self) -> bool:
        """Whether it is worth while."""
        return not self.why_not and self.straight >= _FASTER * self.staged

    def __str__(self) -> str:
        if self.why_not:
            return self.why_not
        how = "straight" if self.is_faster else "no faster straight"
        rates = f"{_rate(self.straight)}, {_rate(self.staged)} by host memory"
        return f"reads into the device {how}, through kvikio ({rates})"


def find_kvikio() -> ModuleType | str:
    """The module, or why it cannot be used."""
    try:
        return importlib.import_module("kvikio")
    except ModuleNotFoundError as error:
        return _INSTALL if error.name == "kvikio" else f"kvikio cannot be loaded: {error}"
    except (ImportError, OSError, RuntimeError) as error:
        return f"kvikio cannot be loaded: {error}"


def try_device_reads(host: Engine, folder: Path, device: Accelerator) -> DeviceReads:
    """Let kvikio read a file of 16 MiB in the folder into the device, compare every byte, and time it.

    Parameters
    ----------
    host : Engine
        Of host memory, which the reads are compared with.
    """
    kvikio = find_kvikio()
    if isinstance(kvikio, str):
        return DeviceReads(kvikio)
    try:
        return _tried(host, DeviceReader(kvikio), folder, device)
    except OSError as error:
        return DeviceReads(f"kvikio could not be tried in {folder}: {error}")


def with_device_reads(host: Engine) -> Engine:
    """An engine that reads through kvikio where the target is a device's; `try_device_reads` has found it well."""
    kvikio = find_kvikio()
    return host if isinstance(kvikio, str) else KvikioEngine(host, DeviceReader(kvikio))


def _tried(host: Engine, reader: DeviceReader, folder: Path, device: Accelerator) -> DeviceReads:
    with ExitStack() as stack:
        stack.callback(reader.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".zerooffload-probe-", dir=folder)))
        file = create_file(scratch / "probe")
        stack.callback(file.close)
        if not file.direct:
            raise OSError(errno.EINVAL, "the file system has no direct I/O")
        content, buffer = _host_memory(stack, device), _host_memory(stack, device)
        content.random_(generator=torch.Generator().manual_seed(0))
        host.submit_write(file, 0, content).wait()
        memory = device.reserve(_PROBE_BYTES)
        memory.fill()
        stack.callback(memory.empty)
        # What used that memory before is over.
        for stream in (device.compute, device.copy_in):
            device.record(stream).wait()

        def read_straight() -> None:
            reader.submit_read(file, 0, memory.tensor).wait()

        def read_by_host() -> None:
            host.submit_read(file, 0, buffer).wait()
            device.copy(device.copy_in, memory.tensor, buffer)
            device.record(device.copy_in).wait()

        if not _is_right(read_straight, content, buffer, memory.tensor, device):
            return DeviceReads(f"kvikio read other bytes in {folder} than were written")
        seconds: dict[Callable[[], None], list[float]] = {read_straight: [], read_by_host: []}
        for _ in range(_NUM_TURNS):
            for read, took in seconds.items():
                begin = time.perf_counter()
                read()
                took.append(time.perf_counter() - begin)
        straight, staged = (_PROBE_BYTES / statistics.median(took) for took in seconds.values())
        return DeviceReads(straight=straight, staged=staged)


def _host_memory(stack: ExitStack, device: Accelerator) -> torch.Tensor:
    """As a staging slot is; let go at the end."""
    memory = populated_pages(_PROBE_BYTES)
    if device.pin(memory):
        stack.callback(device.unpin, memory)
    return memory


def _is_right(
    read: Callable[[], None], content: torch.Tensor, buffer: torch.Tensor, memory: torch.Tensor, device: Accelerator
) -> bool:
    """Whether what is read into the device's memory is the content, to the byte."""
    read()
    device.copy_out.wait(device.record(device.compute))
    device.copy(device.copy_out, buffer, memory)
    device.record(device.copy_out).wait()
    return torch.equal(content, buffer)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s"
