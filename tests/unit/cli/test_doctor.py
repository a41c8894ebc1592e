from __future__ import annotations

import errno
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.refusing_direct_io import refuse_o_direct
from support.simulated_accelerator import SimulatedAccelerator

from zerooffload import native
from zerooffload.calibration import machine_file
from zerooffload.cli import app
from zerooffload.cli.doctor import hardware, software, storage
from zerooffload.cli.doctor.finding import Finding, Verdict
from zerooffload.cli.doctor.profile import profile_findings
from zerooffload.formats import GIB
from zerooffload.machine import CoreShare
from zerooffload.planner.profiles import MachineProfile, write_machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def by_subject(findings: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_it_looks_at_all_that_the_readme_promises(run: Callable[..., tuple[int, str, str]], nvme: Path) -> None:
    code, out, err = run("doctor", "--path", nvme, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["ok"] is True
    subjects = [entry["subject"] for entry in told["findings"]]
    assert subjects == [
        "zerooffload", "torch", "native module", "CPU target", "I/O engine", "GPUDirect Storage", "CPU", "cores",
        "NUMA", "threads", "memory", "memory cgroup", "locked memory", "pinned memory", "huge pages", "GPU",
        "machine profile",
        f"nvme path {nvme}", f"nvme path {nvme}: drive", f"nvme path {nvme}: space", f"nvme path {nvme}: writing",
        f"nvme path {nvme}: engine",
    ]  # fmt: skip
    assert all(entry["value"] for entry in told["findings"])
    assert all(entry["advice"] for entry in told["findings"] if entry["verdict"] == "problem")


def test_the_table_says_the_same(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert "CPU target" in out


def test_a_missing_folder_is_a_problem(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("doctor", "--path", "/no/such/folder")
    assert code == app.EXIT_FOUND_PROBLEM
    assert "create it" in out


def test_without_the_native_module_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "why_unavailable", "built without it")
    found = by_subject(software.software_findings())
    assert "built without it" in found["native module"].value
    assert found["native module"].verdict is Verdict.NOTE
    assert found["CPU target"].value == "torch operations"
    assert found["I/O engine"].value.startswith("aiofiles")


@pytest.mark.usefixtures("wrong_target")
def test_an_unknown_target_is_a_problem(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == app.EXIT_FOUND_PROBLEM
    finding = next(item for item in json.loads(out)["findings"] if item["subject"] == "CPU target")
    assert finding["verdict"] == "problem"
    assert finding["value"] == "'avx9' is not there"
    assert "ZEROOFFLOAD_CPU_TARGET='avx9'" in finding["advice"]
    assert ", ".join(native.module.supported_targets()) in finding["advice"]


def test_a_folder_that_refuses_writing_is_a_problem(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryDirectory", refuse)
    finding = storage._direct_io("writing", nvme)
    assert (finding.verdict, finding.value) == (Verdict.PROBLEM, "failed: Permission denied")


@pytest.mark.skipif(not native.available, reason="needs the native module")
def test_each_engine_is_measured_on_the_folder(nvme: Path) -> None:
    finding = storage._engine("engine", nvme)
    assert finding.verdict is Verdict.OK
    for words in ("threads ", " MB/s", " at once"):
        assert words in finding.value
    if finding.value.startswith("uring"):
        assert "registered" in finding.value


def test_memory_that_cannot_be_registered_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unregistered(storage.UringEngine):
        def __init__(self) -> None:
            self.why_unregistered = ""

        def register(self, memory: Any) -> bool:
            self.why_unregistered = f"{memory.numel()} bytes are too many"
            return False

    monkeypatch.setattr(storage, "_RING_BYTES", 4096)
    assert "4096 bytes are too many" in storage._registration(Unregistered())


def test_a_folder_without_direct_io_is_a_note(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_o_direct(monkeypatch)
    finding = storage._direct_io("writing", nvme)
    assert finding.verdict is Verdict.NOTE
    assert "refuses O_DIRECT" in finding.value
    assert not caplog.records


def test_huge_pages_that_are_off_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(hardware, "_HUGE_PAGES", setting)
    assert hardware._huge_pages().verdict is Verdict.NOTE
    setting.write_text("always [madvise] never\n")
    assert hardware._huge_pages().verdict is Verdict.OK


def test_cores_of_several_nodes_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "this_ranks_cores", lambda: CoreShare((0, 1), 2, (1, 3)))
    finding = hardware._numa()
    assert (finding.verdict, finding.value) == (Verdict.NOTE, "nodes 1, 3")
    assert "numactl --cpunodebind=1 --membind=1" in finding.advice
    monkeypatch.setattr(hardware, "this_ranks_cores", lambda: CoreShare((0, 1), 2, (3,)))
    assert hardware._numa() == Finding("NUMA", "node 3")


def test_a_group_with_little_left_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cgroup_limit_bytes", lambda: 8 * GIB)
    for left, verdict in ((4 * GIB, Verdict.OK), (GIB, Verdict.NOTE)):
        monkeypatch.setattr(hardware, "available_host_bytes", lambda left=left: left)
        assert hardware._memory_cgroup().verdict is verdict


def test_a_limit_of_pinning_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pinnable_bytes", lambda *_: 3 * GIB)
    finding = hardware._pinned(SimulatedAccelerator())
    assert (finding.verdict, finding.value) == (Verdict.NOTE, "no more than 3.00 GiB")
    monkeypatch.setattr(hardware, "pinnable_bytes", lambda *_: None)
    assert hardware._pinned(SimulatedAccelerator()).verdict is Verdict.OK


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is for CUDA")
def test_a_gpu_that_torch_was_not_built_for_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path)
    finding = hardware._gpu()
    assert finding.verdict is Verdict.NOTE
    assert "install torch for CUDA" in finding.advice
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path / "missing")
    assert hardware._gpu().verdict is Verdict.OK


def test_little_space_is_a_note(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = storage.shutil.disk_usage(nvme)
    for free, verdict in ((GIB, Verdict.NOTE), (1000 * GIB, Verdict.OK)):
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert storage._space("space", nvme).verdict is verdict


def test_a_folder_in_memory_is_a_note(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "file_system", lambda _: ("tmpfs", "memory"))
    assert storage._file_system("path", nvme).verdict is Verdict.NOTE


class TestMachineProfile:
    """There, stale, foreign, of other drives, missing, broken."""

    @pytest.fixture(autouse=True)
    def folder(self) -> None:
        machine_file().parent.mkdir(parents=True)

    def finding(self, *paths: Path) -> Finding:
        (finding,) = profile_findings(paths)
        return finding

    def keep(self, **values: Any) -> None:
        device = {"memory": 1, "shares_host_memory": True, "matmul_flops": {"fp32": 1}, "memory_bandwidth": 1}
        host = {"memory": 1, "cores": 1, "memory_bandwidth": 1}
        values = {"name": "fake", "device": device, "host": host, "measured": datetime.now(UTC), **values}
        write_machine(machine_file(), MachineProfile.from_mapping(values))

    def test_missing(self, nvme: Path) -> None:
        finding = self.finding(nvme)
        assert (finding.verdict, finding.value) == (Verdict.NOTE, f"none ({machine_file()})")
        assert f"zerooffload calibrate --path {nvme}`" in finding.advice
        assert "--path FOLDER" in self.finding().advice

    def test_there(self, nvme: Path) -> None:
        self.keep(drives=[{"path": str(nvme), "read": 1, "write": 1}])
        finding = self.finding(nvme)
        assert (finding.verdict, finding.advice) == (Verdict.OK, "")
        assert str(nvme) in finding.value

    def test_without_the_drive(self, nvme: Path) -> None:
        self.keep(drives=[{"path": "/no/such/folder", "read": 1, "write": 1}])
        assert self.finding().verdict is Verdict.OK
        finding = self.finding(nvme)
        assert finding.verdict is Verdict.NOTE
        assert finding.advice == f"it lacks {nvme}: run `zerooffload calibrate --path {nvme}`"

    def test_foreign_and_stale(self) -> None:
        self.keep(identity={"cpu": "another"})
        assert "of another machine (cpu another there" in self.finding().advice
        self.keep(measured=datetime(2020, 1, 1, tzinfo=UTC))
        assert "out of date" in self.finding().advice
        assert self.finding().verdict is Verdict.NOTE

    def test_broken(self) -> None:
        machine_file().write_text("[]")
        assert (self.finding().verdict, self.finding().value) == (Verdict.NOTE, f"cannot be read ({machine_file()})")
