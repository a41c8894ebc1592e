"""`zerooffload plan`: what it shows is the plan, in three forms."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.pages import read_page

from zerooffload import OffloadConfig
from zerooffload.cli import app
from zerooffload.cli.plan import command
from zerooffload.config import TierName
from zerooffload.formats import format_bytes, format_seconds
from zerooffload.machine import cache_folder
from zerooffload.planner.profiles import find_machine
from zerooffload.planner.stages import stage_table
from zerooffload.train import read_recipe
from zerooffload.train.planning import Planner
from zerooffload.train.toml import toml_table

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "dtype": "bfloat16",
}
SMALLEST = ("--batch-size", "1", "--sequence-length", "1")
NVME = ("--set", "offload.params=nvme", "--set", "offload.optimizer=nvme")
KEYS = {
    "": {
        "format", "model", "machine", "step", "drives", "memory", "settings", "homes", "reasons", "offload_toml",
        "spans", "what_if",
    },
    "model": {
        "name", "num_params", "num_trained", "batch_size", "micro_batch_size", "sequence_length",
        "accumulation_steps", "recomputed",
    },
    "machine": {"name", "measured", "ranks"},
    "step": {
        "seconds", "floor_seconds", "tokens", "tokens_per_second", "bound", "update", "busy_seconds", "bytes_moved",
    },
    "drives": {"count", "bytes_written_per_step", "bytes_written_per_day", "days"},
}  # fmt: skip


@pytest.fixture(scope="module")
def planner() -> Planner:
    """One for all tests: what a model asks for is traced once."""
    return Planner()


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planner: Planner) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "Planner", lambda: planner)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options that name a tiny Llama in bf16 and a batch."""
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(LLAMA))
    return ("--model", str(file), "--batch-size", "2", "--sequence-length", "16")


def planned(run: Callable[..., tuple[int, str, str]], *words: str) -> dict[str, Any]:
    code, out, err = run("plan", *words, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    return found


def test_json_has_all_of_a_plan(run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]) -> None:
    told = planned(run, *model, *NVME, "--machine", "4x-rtx4090", "--accumulation", "3")
    for part, keys in KEYS.items():
        assert set(told[part] if part else told) == keys, part
    step = told["step"]
    assert step["tokens"] == 2 * 16 * 3 * 4
    assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["seconds"])
    assert step["bound"] == max(step["busy_seconds"], key=step["busy_seconds"].__getitem__)
    drives = told["drives"]
    assert drives["count"] == 4
    assert drives["bytes_written_per_step"] == 4 * step["bytes_moved"]["nvme_written"] > 0
    assert drives["bytes_written_per_day"] == pytest.approx(drives["bytes_written_per_step"] / step["seconds"] * 86400)
    # Four drives alike share what is written.
    assert drives["days"] == pytest.approx(4 * 7008e12 / drives["bytes_written_per_day"])
    for account in told["memory"]:
        assert sum(account["holders"].values()) == account["leased_bytes"] <= account["budget_bytes"]
        most = max(account["activation_bytes"].values(), default=0)
        assert account["leased_bytes"] + most == account["peak_bytes"] <= account["capacity_bytes"]
    assert all(0 <= begin < end for _, _, begin, end in told["spans"])
    assert max(end for *_, end in told["spans"]) == pytest.approx(step["seconds"], rel=0.1)


def test_it_is_the_plan_of_the_recipe(run: Callable[..., tuple[int, str, str]], recipe_file: Path) -> None:
    told = planned(run, str(recipe_file), "--machine", "rtx4090")
    recipe, machine = read_recipe(recipe_file), find_machine("rtx4090")
    plan = Planner().plan(recipe, machine)
    assert told["step"]["seconds"] == plan.estimate.seconds
    assert told["step"]["bytes_moved"] == plan.estimate.bytes_moved
    assert told["step"]["floor_seconds"] == plan.floor_seconds
    assert told["memory"][1]["leased_bytes"] == plan.announced.planned_bytes(TierName.HOST)
    assert told["memory"][1]["budget_bytes"] == 64 << 20
    assert told["homes"]["model.layers.0"] == {"params": "nvme", "optimizer": "nvme", "gradients": "host"}
    assert told["model"]["recomputed"] == []
    again = planned(run, str(recipe_file), "--machine", "rtx4090", "--set", "model.gradient_checkpointing=true")
    assert again["model"]["recomputed"] == ["model.layers.0", "model.layers.1"]


def test_the_section_is_that_of_the_run_that_was_planned(
    run: Callable[..., tuple[int, str, str]], recipe_file: Path
) -> None:
    mixed = 'offload.optimizer={"model.layers.[0]"="nvme", "*"="host"}'
    told = planned(run, str(recipe_file), "--machine", "rtx4090", "--set", "offload.params=host", "--set", mixed)
    fields = tomllib.loads(told["offload_toml"])["offload"]
    config = OffloadConfig(**fields)
    assert config.host_memory == 64 << 20
    assert config.nvme_paths == read_recipe(recipe_file).offload.nvme_paths
    assert (config.params, config.gradients) == ("host", "host")
    assert list(fields["optimizer"].items())[-1] == ("*", "host")
    assert {name for name, homes in told["homes"].items() if homes["optimizer"] == "nvme"} == {"model.layers.0"}


def test_any_setting_is_written_so_that_it_is_read_again() -> None:
    values = {
        "flag": True,
        "count": 3,
        "none": None,
        "paths": [Path("/mnt/a b"), Path('/mnt/"c"\\d\x7f\n')],
        "homes": {'layers.[0]."x"\\*': "nvme", "ünit": "host", "*": "host"},
        "empty": {},
        "name": "last",
    }
    read = tomllib.loads("\n".join(toml_table("offload", values)))["offload"]
    assert read == {
        "flag": True,
        "count": 3,
        "paths": [str(path) for path in values["paths"]],
        "homes": values["homes"],
        "name": "last",
    }
    assert list(read["homes"]) == list(values["homes"])


def test_a_person_reads_the_same_figures(run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]) -> None:
    words = (*model, *NVME, "--machine", "rtx4090")
    told = planned(run, *words)
    code, out, err = run("plan", *words)
    assert (code, err) == (0, "")
    text = re.sub(r"\s+", " ", out)
    step, drives = told["step"], told["drives"]
    assert f"A step of 32 tokens takes {format_seconds(step['seconds'])}" in text
    assert f"The bound is {step['bound']}" in text
    for resource, seconds in step["busy_seconds"].items():
        assert (f"{resource} {format_seconds(seconds)} " in text) == (seconds > 0)
    for link, nbytes in step["bytes_moved"].items():
        assert (f"{link.replace('_', ' ')} {format_bytes(nbytes)} " in text) == (nbytes > 0)
    for account in told["memory"]:
        assert format_bytes(account["peak_bytes"]) in text
    assert f"{format_bytes(drives['bytes_written_per_day'])} a day: they bear it for {drives['days']:,.0f} days" in text
    assert re.sub(r"\s+", " ", told["offload_toml"]).strip() in text


def test_the_page_is_one_file_that_fetches_nothing(
    run: Callable[..., tuple[int, str, str]], model: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "plan.html"
    code, out, err = run("plan", *model, *NVME, "--machine", "rtx4090", "--html", file)
    assert (code, err) == (0, "")
    assert f"page written to {file}" in out
    told = planned(run, *model, *NVME, "--machine", "rtx4090")
    text = file.read_text(encoding="utf-8")
    assert "http://" not in text
    assert "https://" not in text
    page = read_page(text)
    assert page.fetches == []
    assert "default-src 'none'" in text
    assert page.data["seconds"] == told["step"]["seconds"]
    assert sum(len(row) for lane in page.data["lanes"] for row in lane["rows"]) == len(told["spans"])
    assert len(page.data["names"]) == len(page.data["shades"]) == len({name for _, name, *_ in told["spans"]})
    for account in told["memory"]:
        for holder, nbytes in account["holders"].items():
            assert f"{holder}{format_bytes(nbytes)}" in page.text
    assert told["offload_toml"].strip() in page.text
    assert "{{" not in text


def test_no_name_becomes_markup(
    run: Callable[..., tuple[int, str, str]], model: tuple[str, ...], tmp_path: Path
) -> None:
    evil, file = "</script><b>&{{title}}", tmp_path / "plan.html"
    machine = tmp_path / "machine.json"
    machine.write_text(find_machine("rtx4090").model_copy(update={"name": evil}).model_dump_json())
    assert run("plan", *model, "--machine", machine, "--html", file)[0] == 0
    page = read_page(file.read_text(encoding="utf-8"))
    assert evil in page.text
    assert "b" not in page.tags


def test_plans_side_by_side(run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]) -> None:
    words = (*model, *NVME, "--machine", "rtx4090")
    what_ifs = ("machine.drives=1", "4x-rtx4090", "offload.host_memory=1KiB")
    told = planned(run, *words, *(word for what in what_ifs for word in ("--what-if", what)))
    one_drive, four_devices, too_little = told["what_if"]
    assert [other["what"] for other in told["what_if"]] == list(what_ifs)
    assert one_drive["step"] == planned(run, *words, "--set", "machine.drives=1")["step"]
    assert one_drive["drives"]["count"] == 1
    assert four_devices["step"] == planned(run, *model, *NVME, "--machine", "4x-rtx4090")["step"]
    assert set(too_little) == {"what", "refused"}
    code, out, _ = run("plan", *words, *(word for what in what_ifs for word in ("--what-if", what)))
    assert code == 0
    rows = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    seconds = [format_seconds(found["step"]["seconds"]) for found in (told, one_drive, four_devices)]
    assert re.findall(r"\d[\d.]* \w?s|does not fit", rows["step"]) == [*seconds, "does not fit"]
    assert "offload.host_memory=1KiB: the run does not fit the host budget" in out


def test_what_does_not_fit_is_told_with_what_would_help(
    run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]
) -> None:
    small = (*model, *NVME, "--machine", "rtx4090", "--set", "offload.host_memory=1KiB")
    code, out, err = run("plan", *small)
    assert (code, out) == (app.EXIT_USER_ERROR, "")
    assert "error: the run does not fit the host budget" in err
    assert "smallest change: host_memory" in err
    code, out, err = run("plan", *small, "--what-if", "offload.host_memory=1GiB", "--json")
    assert code == app.EXIT_USER_ERROR
    told = json.loads(out)
    assert set(told) == {"refused", "what_if"}
    assert told["what_if"][0]["memory"][1]["budget_bytes"] == 1 << 30


def test_zeros_table(run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]) -> None:
    code, out, err = run("plan", *model[:2], "--zero-table", "--ranks", "8", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    rows = stage_table(told["num_params"], 8)
    assert told["dtype"] == "bfloat16"
    assert [row["zero_bytes"] for row in told["stages"]] == [round(row.zero) for row in rows]
    assert [row["bytes"] for row in told["stages"]] == [round(row.ours) for row in rows]
    # 16 and 14 bytes a parameter on one rank of eight.
    assert told["stages"][3]["zero_bytes"] == pytest.approx(2 * told["num_params"])
    code, out, _ = run("plan", *model[:2], "--zero-table")
    assert code == 0
    assert "States of a rank of 64" in out
    assert re.search(r"2 +whole +sharded +sharded", out)


def test_the_machine_is_by_default_what_calibrate_has_left(
    run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]
) -> None:
    code, _, err = run("plan", *model)
    assert code == app.EXIT_USER_ERROR
    assert "there is no profile of this machine: run zerooffload calibrate" in err
    file = cache_folder() / "machine.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(find_machine("rtx4090").model_dump_json())
    told = planned(run, *model)
    assert told["machine"]["name"] == "rtx4090"
    # The process before the run is this one's.
    assert told["memory"][1]["baseline_bytes"] > 1 << 20
    assert planned(run, *model, "--machine", "rtx4090")["memory"][1]["baseline_bytes"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plan needs a recipe"),
        (["--model", "{model}"], "--model needs --batch-size and --sequence-length"),
        (
            ["--model", "/no/such/model.json", *SMALLEST],
            "there is no file /no/such",
        ),
        (["--model", "/no/such", *SMALLEST, "--machine", "rtx4090"], "does not exist"),
        (["{model}", "--batch-size", "1"], "a recipe tells its batches"),
        (["{all}", "--machine", "dgx3"], "no machine profile 'dgx3'"),
        (["{all}", "--machine", "dgx2"], "dgx2 has no rate of matrix products in bf16"),
        (["{all}", "--machine", "rtx4090", "--set", "offload.micro_batch_size=3"], "a batch of 2 is no multiple of"),
        (["{all}", "--machine", "rtx4090", "--set", "ofload.params=host"], "unknown section [ofload]"),
        (["{all}", "--machine", "rtx4090", "--set", "machine.host.ram=1GB"], "host.ram: unknown setting"),
        (["{all}", "--machine", "rtx4090", "--set", "machine.drives=7"], "machine.drives=7: rtx4090 has 4"),
        (["{all}", "--machine", "rtx4090", "--set", "machine.nodes=2"], "rtx4090 tells no network"),
        (["{all}", "--machine", "rtx4090", "--set", "machine.nodes=two"], "expected how many machines"),
        (["{all}", "--machine", "rtx4090", "--what-if", "offload.param=host"], "unknown key offload.param"),
        (["{all}", "--machine", "rtx4090", "--html", "/no/such/plan.html"], "/no/such is not a folder"),
    ],
)
def test_what_cannot_be_planned_is_a_users_error(
    run: Callable[..., tuple[int, str, str]], model: tuple[str, ...], words: list[str], message: str
) -> None:
    given = [part for word in words for part in (model if word == "{all}" else [word.replace("{model}", model[1])])]
    code, out, err = run("plan", *given)
    assert (code, out) == (app.EXIT_USER_ERROR, "")
    assert message in err
    assert "Traceback" not in err


def test_ranks_of_several_machines_are_planned_together(
    run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]
) -> None:
    fp16 = ("--machine", "dgx2", "--set", "offload.compute_dtype=fp16")
    one, four = planned(run, *model, *fp16), planned(run, *model, *fp16, "--set", "machine.nodes=4")
    assert (one["machine"]["ranks"], four["machine"]["ranks"]) == (16, 64)
    assert four["machine"]["name"] == "4 x dgx2"
    assert four["step"]["tokens"] == 4 * one["step"]["tokens"]
    for found, rate in ((one, 150e9), (four, 80e9)):
        step = found["step"]
        nbytes = step["bytes_moved"]["gathered"] + step["bytes_moved"]["reduced"]
        assert step["busy_seconds"]["link"] == pytest.approx(nbytes / rate)


def test_only_the_drives_that_a_recipe_names_count(
    run: Callable[..., tuple[int, str, str]], model: tuple[str, ...]
) -> None:
    words = (*model, *NVME, "--machine", "rtx4090")
    named = planned(run, *words, "--set", 'offload.nvme_paths=["/mnt/nvme1/run", "/mnt/nvme3"]')
    assert named["drives"]["count"] == 2
    assert named["step"] == planned(run, *words, "--set", "machine.drives=2")["step"]
    # Paths of another machine: its drives stand for them.
    assert planned(run, *words, "--set", 'offload.nvme_paths=["/data"]')["drives"]["count"] == 4
