from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from zerooffload import native
from zerooffload.cli import app
from zerooffload.cli.doctor import hardware, software, storage
from zerooffload.cli.doctor.finding import Finding, Verdict

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
        "zerooffload", "torch", "native module", "CPU target", "I/O engine", "cores", "threads", "memory",
        "memory cgroup", "locked memory", "huge pages", "GPU",
        f"nvme path {nvme}", f"nvme path {nvme}: space", f"nvme path {nvme}: writing",
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


@pytest.mark.skipif(not native.available, reason="needs the native module")
def test_an_unknown_target_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def supported_targets() -> list[str]:
            return ["baseline"]

        @staticmethod
        def active_target() -> str:
            raise ValueError("unknown CPU target 'x'")

    monkeypatch.setattr(software.native, "module", Wrong)
    finding = software._cpu_target()
    assert finding.verdict is Verdict.PROBLEM
    assert "baseline" in finding.advice


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
    real = os.open

    def refuse_direct(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse_direct)
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
