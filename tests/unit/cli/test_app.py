from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.folders import leftovers
from support.pages import read_page
from support.trace_events import read_trace

import zerooffload as zo
from zerooffload.cli import app
from zerooffload.train import loop

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_version(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("--version") == (0, f"zerooffload {zo.__version__}\n", "")


def test_help_names_the_commands(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "train" in out
    assert "doctor" in out


@pytest.mark.parametrize("arguments", [["no-such-command"], ["train"], ["train", "x.toml", "--no-such-option"]])
def test_a_wrong_command_line_is_a_users_error(run: Callable[..., tuple[int, str, str]], arguments: list[str]) -> None:
    code, _, err = run(*arguments)
    assert code == app.EXIT_USER_ERROR
    assert "Traceback" not in err


def test_train_shows_the_run_and_writes_its_report(
    run: Callable[..., tuple[int, str, str]], recipe_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    report_file = tmp_path / "report.json"
    code, out, err = run("train", recipe_file, "--set", "training.steps=3", "--report", report_file)
    assert (code, err) == (0, "")
    for words in ("held-out loss before training", "step 3/3", "held-out loss after training", "baseline", "nvme"):
        assert words in out, words
    report = json.loads(report_file.read_text())
    assert report["steps"] == 3
    assert report["nvme_written_bytes"] > 0
    assert report["peak_bytes"]["host"] == report["planned_bytes"]["host"]


def test_train_writes_a_timeline_of_its_first_steps_and_a_page_of_its_last(
    run: Callable[..., tuple[int, str, str]], recipe_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    page_file, trace_file = tmp_path / "report.html", tmp_path / "trace.json"
    options = ("--report", page_file, "--trace", trace_file, "--trace-steps", 2)
    # An update that is hidden may be over, or not begun, while a step lasts.
    settings = ("--set", "training.steps=4", "--set", 'offload.update="after_backward"')
    code, out, err = run("train", recipe_file, *settings, *options)
    assert (code, err) == (0, "")
    assert f"report written to {page_file}" in out.replace("\n", "")
    assert f"trace written to {trace_file}" in out.replace("\n", "")
    trace = read_trace(trace_file)
    # The evaluation before training is no step's.
    assert [event["name"] for event in trace.lanes["step"]] == ["step 1", "step 2"]
    assert trace.lanes["compute"][0]["ts"] >= trace.lanes["step"][0]["ts"]
    assert trace.lanes["nvme read"]
    page = read_page(page_file.read_text(encoding="utf-8"))
    assert page.data["number"] == 4
    assert len(page.data["losses"]) == 4
    # All that is read is in host memory by then.
    assert {"compute", "copy in", "nvme write", "CPU update"} <= {lane["lane"] for lane in page.data["lanes"]}


def test_losses_are_the_same_whoever_watches(
    run: Callable[..., tuple[int, str, str]], recipe_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    losses = []
    for name, options in (("plain", ()), ("traced", ("--trace", tmp_path / "trace.json"))):
        report = tmp_path / f"{name}.json"
        assert run("train", recipe_file, "--set", "offload.overwrite=true", "--report", report, *options)[0] == 0
        losses.append(json.loads(report.read_text())["losses"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainig.steps=3", "did you mean training?"),
        ("training.stps=3", "did you mean training.steps?"),
        ("offload.host_memory=4KiB", "smallest change: host_memory"),
        ("offload.nvme_paths=/no/such/folder", "/no/such/folder is not a folder"),
        ("data.path=/no/such/file", "/no/such/file does not exist"),
        ('model={name="/no/such/model"}', "/no/such/model does not exist"),
    ],
)
def test_a_users_error_is_one_message(
    run: Callable[..., tuple[int, str, str]], recipe_file: Path, setting: str, words: str
) -> None:
    pytest.importorskip("transformers")
    if setting.startswith("model="):
        text = recipe_file.read_text()
        recipe_file.write_text('[model]\nname = "/no/such/model"\n' + text[text.index("[data]") :])
        code, _, err = run("train", recipe_file)
    else:
        code, _, err = run("train", recipe_file, "--set", setting)
    assert code == app.EXIT_USER_ERROR
    assert words in err
    assert "Traceback" not in err
    assert err.startswith("error: ")


@pytest.mark.usefixtures("wrong_target")
def test_a_target_that_is_not_there_is_one_message(run: Callable[..., tuple[int, str, str]], recipe_file: Path) -> None:
    code, _, err = run("train", recipe_file)
    assert code == app.EXIT_USER_ERROR
    assert err.startswith("error: ZEROOFFLOAD_CPU_TARGET='avx9' is not a CPU target of this build and this CPU")


@pytest.mark.parametrize("option", ["--report", "--trace"])
def test_a_report_that_has_no_folder_is_found_before_training(
    run: Callable[..., tuple[int, str, str]], recipe_file: Path, option: str
) -> None:
    code, out, err = run("train", recipe_file, option, "/no/such/folder/report.json")
    assert (code, out) == (app.EXIT_USER_ERROR, "")
    assert "/no/such/folder is not a folder" in err


def test_debug_shows_where_an_error_came_from(recipe_file: Path) -> None:
    with pytest.raises(zo.ConfigError, match="stps"):
        app.main(["--debug", "train", str(recipe_file), "--set", "training.stps=1"])


def test_ctrl_c_ends_cleanly(
    run: Callable[..., tuple[int, str, str]], recipe_file: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    in_use: list[str] = []

    def interrupted(*_: object) -> None:
        in_use.extend(entry.name for entry in nvme.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(zo, "clip_grad_norm_", interrupted)
    code, _, err = run("train", recipe_file, "--set", "training.max_grad_norm=1.0")
    assert code == app.EXIT_INTERRUPTED
    assert "interrupted" in err
    assert "Traceback" not in err
    assert in_use == ["zerooffload"]
    assert leftovers(nvme) == []


def test_a_bug_of_ours_shows_its_traceback(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def broken(*_: object) -> None:
        raise zo.InternalError("broken invariant")

    monkeypatch.setattr(loop, "evaluate", broken)
    with pytest.raises(zo.InternalError, match="broken invariant"):
        app.main(["train", str(recipe_file)])
