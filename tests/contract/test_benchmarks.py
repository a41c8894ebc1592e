"""The benchmarks of the drive run, clean up, and say what is wrong with their input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.thoroughness import EXHAUSTIVE

from zerooffload import native

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUNNER = Path(__file__).parents[1] / "support" / "script_runner.py"
NO_PYTHON = str(Path(sys.executable).with_name("no-python-at-all"))
TINY = {
    "nvme_bandwidth.py": ("--gib", "0.1", "--seconds", "0.01", "--repetitions", "1"),
    "optimizer_stream.py": (
        "--parameters",
        "12582912",
        "--steps",
        "2",
        "--grid-seconds",
        "0.01",
        "--engine",
        "threads",
    ),
    "checkpoint_bandwidth.py": (
        *("--parameters", "1048576", "--saves", "1", "--compute", "0.01", "--grid-seconds", "0.01"),
        *("--engine", "threads"),
    ),
    "overlap.py": (
        *("--params", "1e6", "--width", "256", "--window-units", "3", "--steps", "2", "--rounds", "1"),
        *("--limit-gib", "0.1", "--grid-seconds", "0.01", "--disk-turn-seconds", "0.01", "--probe-numel", "1048576"),
        *("--engine", "threads"),
    ),
    "step_time.py": (
        *("--layers", "1", "--hidden", "64", "--vocab", "256", "--shapes", "2x16", "--rounds", "1", "--warm-up", "2"),
        *("--limit-gib", "0.1", "--grid-seconds", "0.01", "--disk-turn-seconds", "0.01"),
        *("--only", "all-host", "all-nvme", "fsdp2", "deepspeed", "--peers-python", NO_PYTHON),
    ),
}

pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="a source package has no benchmarks")


@dataclass(frozen=True)
class Ended:
    """How a benchmark did."""

    status: int
    stderr: str


Run = Callable[..., Ended]
ResultOf = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a benchmark with these words; all of them in one process, because imports take longer than most."""
    command = [sys.executable, "-P", RUNNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def run(name: str, *words: str | Path) -> Ended:
            print(json.dumps([str(BENCHMARKS / name), *map(str, words)]), file=ask, flush=True)
            return Ended(*json.loads(answers.readline()))

        yield run
        process.kill()


@pytest.fixture
def result_of(run: Run, tmp_path: Path) -> ResultOf:
    return partial(run_tiny, run, tmp_path)


def run_tiny(run: Run, folder: Path, name: str, *more: str) -> dict[str, Any]:
    if shutil.which("cc") is None:
        pytest.skip("the limit is a C program, and there is no compiler")
    if not native.available:
        pytest.skip(f"no native engine to compare: {native.why_unavailable}")
    drive, file = folder / "drive", folder / "result.json"
    drive.mkdir()
    done = run(name, drive, *TINY[name], *more, "--json", file)
    assert not list(drive.iterdir())
    if "cannot be opened with O_DIRECT" in done.stderr:
        pytest.skip("the file system of the temporary folder has no direct I/O")
    assert done.status == 0, done.stderr
    result = json.loads(file.read_text())
    assert {"machine", "versions", "rows", "checks"} <= set(result)
    assert all(set(item) == {"name", "value", "target", "better", "ok"} for item in result["checks"])
    return result


def test_nvme_bandwidth_compares_each_engine_that_works_with_the_limit(result_of: ResultOf) -> None:
    result = result_of("nvme_bandwidth.py")
    who = {row["who"] for row in result["rows"]}
    assert {"threads", "limit", "aiofiles"} <= who
    assert ("uring" in who) != ("uring" in result["missing"])
    assert ("fio" in who) != ("fio" in result["missing"])
    assert all(row["gb_per_second"]["median"] > 0 for row in result["rows"])
    checked = {"uring": 16, "threads": 16}
    assert len(result["checks"]) == sum(num for name, num in checked.items() if name in who)


def test_a_streamed_step_moves_the_bytes_of_the_formula(result_of: ResultOf) -> None:
    result = result_of("optimizer_stream.py")
    assert [row["name"] for row in result["rows"]] == ["atomic fp32 threads", "in place fp32 threads"]
    for row in result["rows"]:
        assert row["step_seconds"]["median"] > 0 < row["floor_seconds"]["median"]
    moved = [item for item in result["checks"] if "bytes" in item["name"]]
    assert len(moved) == 4
    assert all(item["ok"] for item in moved)


def test_saves_have_the_bytes_of_the_formula(result_of: ResultOf) -> None:
    result = result_of("checkpoint_bandwidth.py")
    assert [row["name"] for row in result["rows"]] == ["from host", "from nvme"]
    assert all(row["save_seconds"]["median"] > 0 <= row["blocked_share"]["low"] for row in result["rows"])
    saved = [item for item in result["checks"] if "bytes" in item["name"]]
    assert len(saved) == 2
    assert all(item["ok"] for item in saved)


@pytest.mark.parametrize("placement", ["all-nvme", "optimizer-nvme", "all-host"])
def test_a_step_with_simulated_compute_moves_the_bytes_of_the_formula(placement: str, result_of: ResultOf) -> None:
    result = result_of("overlap.py", "--placement", placement)
    (row,) = result["rows"]
    assert row["step_seconds"]["median"] > 0 < row["floor_seconds"]["median"]
    assert row["compute_seconds"]["median"] > 0
    moved = [item for item in result["checks"] if "bytes" in item["name"]]
    assert len(moved) == 4
    assert all(item["ok"] for item in moved)
    assert any(item["name"] == f"{placement}: step, of the floor" for item in result["checks"])


def test_accumulation_and_clipping_move_the_bytes_of_the_formula(result_of: ResultOf) -> None:
    result = result_of("overlap.py", "--accumulation", "2", "--clip", "always")
    assert result["rows"][0]["schedule"] == "under_next_forward"
    assert all(item["ok"] for item in result["checks"] if "bytes" in item["name"])


def test_micro_batches_inside_blocks_move_the_bytes_of_one(result_of: ResultOf) -> None:
    result = result_of("overlap.py", "--micro-batches", "4")
    assert result["rows"][0]["name"] == "all-nvme, micro-batches 4"
    assert all(item["ok"] for item in result["checks"] if "bytes" in item["name"])


def test_overlap_with_real_compute(result_of: ResultOf, tmp_path: Path) -> None:
    result = result_of("overlap.py", "--device", "cpu", "--trace", str(tmp_path / "trace.json"))
    assert result["rows"][0]["name"] == "all-nvme, cpu"
    assert all(item["ok"] for item in result["checks"] if "bytes" in item["name"])
    assert '"step' in (tmp_path / "trace.json").read_text()


def test_contestants_of_a_step_have_the_same_losses_and_a_missing_one_is_told(result_of: ResultOf) -> None:
    result = result_of("step_time.py")
    rows = {row["contestant"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "all-host", "all-nvme", "fsdp2", "deepspeed"]
    assert all(("missing" in row) != ("step_seconds" in row) for row in rows.values())
    assert NO_PYTHON in rows["deepspeed"]["missing"]
    assert rows["all-host"]["losses"] == rows["all-nvme"]["losses"]
    assert len(rows["plain"]["losses"]) == 4
    losses = [item for item in result["checks"] if "losses" in item["name"]]
    assert len(losses) == 2
    assert all(item["ok"] for item in losses)


@pytest.fixture
def train_shortly(run: Run, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """A benchmark that trains small recipes, as short as it can: its result, and its table."""
    pytest.importorskip("transformers")
    drive, file, table = tmp_path / "drive", tmp_path / "result.json", tmp_path / "table.md"
    drive.mkdir()
    profile = tmp_path / "machine.toml"
    profile.write_text(
        f"""
        name = "some machine"
        [device]
        memory = "8GiB"
        shares_host_memory = true
        matmul_flops = {{ fp32 = 1e11 }}
        memory_bandwidth = 2e10
        [host]
        memory = "8GiB"
        cores = 2
        memory_bandwidth = 2e10
        [[drives]]
        path = "{drive}"
        read = 3e9
        write = 3e9
        """
    )

    def trained(name: str, *words: str) -> tuple[dict[str, Any], str]:
        short = ("--quick", "--rounds", "1", "--steps", "1", "--machine", profile)
        done = run(name, drive, *short, *words, "--json", file, "--table", table)
        if "refuses direct I/O" in done.stderr:
            pytest.skip("the file system of the temporary folder has no direct I/O")
        assert done.status == 0, done.stderr
        assert not list(drive.iterdir())
        return json.loads(file.read_text()), table.read_text()

    return trained


def test_plans_are_compared_with_what_came(train_shortly: Callable[..., tuple[dict[str, Any], str]]) -> None:
    result, table = train_shortly("plan_accuracy.py", "--warm-up", "1")
    assert len(result["rows"]) == 1
    for row in result["rows"]:
        assert row["step_seconds"]["measured"] > 0 < row["step_seconds"]["predicted_then"]
        assert all(both["predicted"] == both["measured"] for both in row["leased_bytes"].values())
    assert [item["name"] for item in result["checks"] if "leases" in item["name"] and item["ok"]]
    assert table.count("| small |") == 1


@pytest.mark.skipif(not EXHAUSTIVE, reason="tunes for minutes: set ZEROOFFLOAD_TEST_EXHAUSTIVE=1")
def test_what_tune_finds_is_timed_beside_all(train_shortly: Callable[..., tuple[dict[str, Any], str]]) -> None:
    result, table = train_shortly("tune_beside_all.py", "--trials", "1")
    (row,) = result["rows"]
    assert row["num_all"] == row["num_that_fit"] == 2
    assert row["tuned_seconds"] > 0 < row["best_seconds"]
    assert row["best"] in table.replace("after backward", "after_backward")


def test_the_search_of_plans_is_timed(run: Run, tmp_path: Path) -> None:
    file, table = tmp_path / "result.json", tmp_path / "table.md"
    done = run("plan_search.py", "--blocks", "2", "--repeats", "1", "--json", file, "--table", table)
    assert done.status == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4
    assert all(row["seconds"]["median"] > 0 for row in rows)
    assert table.read_text().count("| 2 |") == 4


@pytest.mark.parametrize("name", TINY)
def test_a_missing_folder_is_told(name: str, run: Run, tmp_path: Path) -> None:
    done = run(name, tmp_path / "nowhere")
    assert done.status == 1
    assert "nowhere is not a folder" in done.stderr


@pytest.mark.parametrize(
    ("name", "too_much", "needed"),
    [
        ("nvme_bandwidth.py", "--gib=1e6", "3906 TiB"),
        ("optimizer_stream.py", "--parameters=1e15", "32742 TiB"),
        ("overlap.py", "--params=1e15", "25466 TiB"),
        ("step_time.py", "--limit-gib=1e7", "9766 TiB"),
    ],
)
def test_too_little_space_is_told_with_what_is_needed(
    name: str, too_much: str, needed: str, run: Run, tmp_path: Path
) -> None:
    done = run(name, tmp_path, too_much)
    assert done.status == 1
    assert f"this takes {needed}" in done.stderr
    assert not list(tmp_path.iterdir())
