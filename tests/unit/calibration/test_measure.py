"""The real measurements, as short as can be: that they measure what they say, and leave nothing."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
import torch
from support.calibrations import SHORT
from support.refusing_direct_io import refuse_o_direct
from support.simulated_accelerator import Copies, SimulatedAccelerator
from torch.utils.flop_counter import FlopCounterMode

from zerooffload import native
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.aio import choose_engine
from zerooffload.aio.traffic import Traffic
from zerooffload.calibration import calibrate, device, drives, host, measure
from zerooffload.calibration.host import pinnable_bytes
from zerooffload.errors import ConfigError, TierIOError
from zerooffload.formats import MIB

if TYPE_CHECKING:
    from pathlib import Path

HOST_FIGURES = {
    "host.memory_bandwidth",
    "host.update_bandwidth",
    "host.first_touch_bandwidth",
    "host.checksum_bandwidth",
}
DEVICE_FIGURES = {
    *(f"device.matmul_flops.{dtype}" for dtype in ("fp32", "bf16", "fp16")),
    "device.memory_bandwidth",
    "device.operation_seconds",
}
COPY_FIGURES = {"device.copy_in", "device.copy_out", "device.copy_both"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_drive_and_a_device_of_the_hosts_memory(nvme: Path) -> None:
    told: list[tuple[str, float]] = []
    profile = calibrate([nvme], CpuAccelerator(), SHORT, lambda what, part: told.append((what, part)))
    drive_figures = {
        f"drives.0.{name}"
        for name in ("read", "write", "sustained_write", "mixed.0.rate", "mixed.1.rate", "mixed.2.rate")
    }
    assert set(profile.spread) == HOST_FIGURES | DEVICE_FIGURES | drive_figures
    assert profile.device.shares_host_memory
    assert profile.device.copy_in is None
    assert profile.host.pinnable is None
    assert profile.measured is not None
    assert [mix.read_part for mix in profile.drives[0].mixed] == [0.25, 0.5, 0.75]
    assert profile.drives[0].path == str(nvme)
    assert set(profile.spread) < {what for what, _ in told}
    parts = [part for _, part in told]
    assert parts == sorted(parts)
    assert parts[-1] < 1


@pytest.mark.parametrize("copies", Copies)
def test_a_device_with_memory_of_its_own(copies: Copies) -> None:
    accelerator = SimulatedAccelerator(copies)
    try:
        profile = calibrate((), accelerator, SHORT)
    finally:
        accelerator.close()
    assert set(profile.spread) == HOST_FIGURES | DEVICE_FIGURES | COPY_FIGURES
    assert not profile.device.shares_host_memory
    assert profile.drives == ()
    # Whatever was copied was there.
    assert accelerator.num_spoiled == 0


def test_both_directions_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimulatedAccelerator(Copies.EARLY)
    copies = device._Copies(accelerator, MIB)
    rates = {id(accelerator.copy_in): 3.0, id(accelerator.copy_out): 4.0}
    monkeypatch.setattr(copies, "_one_way", lambda stream, *_: rates[id(stream)])
    assert (copies.inwards(1), copies.outwards(1), copies.both(1)) == (3.0, 4.0, 7.0)


def test_a_layers_operations_are_those_of_its_three_products() -> None:
    layer = device._Layer(8, torch.float32, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        layer()
    assert layer.flops == counter.get_total_flops()


@pytest.mark.parametrize(("flops_per_second", "width"), [(1e6, 64), (1e9, 64), (1e10, 256), (1e12, 1024), (1e18, 4096)])
def test_a_dtype_that_is_slow_gets_a_small_layer(
    flops_per_second: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Layer:
        def __init__(self, width: int, *_: object) -> None:
            self.width, self._num_calls = width, 0

        def __call__(self) -> None:
            nonlocal now
            self._num_calls += 1
            # The first call of all takes long.
            now += 48 * self.width**3 / flops_per_second + (60.0 if self._num_calls == 1 else 0.0)

    monkeypatch.setattr(device, "_Layer", Layer)
    monkeypatch.setattr(device.time, "perf_counter", lambda: now)
    layer = device._layer_for(0.1, torch.float32, torch.device("cpu"), lambda: None)
    assert layer.width == width
    # The next one would be too wide for the turn, or for all.
    assert width == 4096 or 48 * (2 * width) ** 3 / flops_per_second > 0.1
    assert width == 64 or 48 * width**3 / flops_per_second <= 0.1


def test_without_the_native_module_torch_moves_the_memory(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "why_unavailable", "built without it")
    profile = calibrate([nvme], CpuAccelerator(), SHORT)
    assert set(profile.spread) > HOST_FIGURES
    assert profile.identity["cpu target"] == "torch operations"


@pytest.mark.parametrize("is_native", [False, True])
def test_traffic_counts_28_bytes_a_parameter(*, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_native and not native.available:
        pytest.skip("needs the native module")
    monkeypatch.setattr(native, "available", is_native)
    grad, *others = (torch.ones(64) for _ in range(4))
    traffic = host._SameTraffic(grad, others)
    traffic()
    assert traffic.nbytes == 28 * 64
    assert torch.equal(grad, torch.ones(64))


def test_what_could_be_pinned_ends_where_it_fails() -> None:
    class Limited(SimulatedAccelerator):
        def __init__(self) -> None:
            super().__init__()
            self.pinned: list[int] = []
            self.num_unpinned = 0

        def pin(self, memory: torch.Tensor) -> bool:
            if len(self.pinned) == 2:
                return False
            self.pinned.append(memory.data_ptr())
            return True

        def unpin(self, memory: torch.Tensor) -> None:
            self.pinned.remove(memory.data_ptr())
            self.num_unpinned += 1

    limited = Limited()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_PINNED_BYTES", MIB)
        patch.setattr(host, "available_host_bytes", lambda: 64 * MIB)
        assert pinnable_bytes(limited, seconds=60) == 2 * MIB
        assert (limited.pinned, limited.num_unpinned) == ([], 2)
        # No more than a quarter is tried.
        patch.setattr(host, "available_host_bytes", lambda: 8 * MIB)
        assert pinnable_bytes(limited, seconds=60) is None
        assert limited.num_unpinned == 4


def test_nothing_is_pinned_for_a_device_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "populated_pages", lambda _: pytest.fail("memory was taken"))
    assert pinnable_bytes(CpuAccelerator(), seconds=60) is None


def test_wrong_paths_are_refused_before_anything_is_measured(tmp_path: Path, nvme: Path) -> None:
    def refused(*paths: Path) -> str:
        with pytest.raises(ConfigError) as error:
            calibrate(paths, effort=SHORT, progress=lambda what, _: pytest.fail(what))
        return str(error.value)

    assert "Create it" in refused(tmp_path / "missing")
    assert "one file system" in refused(nvme, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        usage = drives.shutil.disk_usage(nvme)
        patch.setattr(drives.shutil, "disk_usage", lambda _: usage._replace(free=100 * MIB))
        assert "100 MiB free, 512 MiB needed" in refused(nvme)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "available_host_bytes", lambda: 100 * MIB)
        assert "end other programs" in refused(nvme)


def test_a_file_system_without_direct_io_is_refused(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_o_direct(monkeypatch)
    with pytest.raises(ConfigError, match="refuses direct I/O"):
        calibrate([nvme], effort=SHORT)


@pytest.mark.parametrize("method", ["fill", "move", "flush"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), TierIOError("write", "/x", errno.ENOSPC)])
def test_whatever_ends_it_nothing_is_left(
    nvme: Path, method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: set[int] = set()

    def fail(traffic: Traffic, *_: object) -> None:
        files.add(traffic._file.fd)
        raise error

    monkeypatch.setattr(Traffic, method, fail)
    # The choice of an engine is not what fails here.
    monkeypatch.setattr(drives, "choose_engine", lambda *_, **__: choose_engine())
    with pytest.raises(type(error)):
        calibrate([nvme], CpuAccelerator(), SHORT)
    (fd,) = files
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
