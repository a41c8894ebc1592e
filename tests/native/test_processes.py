"""The native module in processes of its own: what depends on a process's start, or on a fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

n = pytest.importorskip("zerooffload._native")

ENGINES = ["ThreadEngine(2)", "UringEngine(8, 4096)"]


def in_new_process(script: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import zerooffload._native as n\n{script}"],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_the_environment_forces_a_target() -> None:
    for name in n.supported_targets():
        assert in_new_process("print(n.active_target())", ZEROOFFLOAD_CPU_TARGET=name) == name
    best = n.supported_targets()[-1]
    assert in_new_process("print(n.active_target())", ZEROOFFLOAD_CPU_TARGET="") == best


def test_an_unknown_target_in_the_environment_fails_at_first_use() -> None:
    script = """
pool = n.ThreadPool(1)
for use in (n.active_target, lambda: n.square_sums(pool, 0, n.Dtype.float32, 0, 0), n.active_target):
    try:
        use()
    except ValueError as error:
        print(error)
n.set_target("baseline")
print(n.active_target())
"""
    lines = in_new_process(script, ZEROOFFLOAD_CPU_TARGET="fast").splitlines()
    assert len(lines) == 4
    assert all(line.startswith("ZEROOFFLOAD_CPU_TARGET: CPU target 'fast' is unknown") for line in lines[:3])
    assert lines[3] == "baseline"


def test_an_unknown_target_in_the_environment_is_a_users_error() -> None:
    script = """
import torch
import zerooffload as zo
try:
    zo.offload(torch.nn.Linear(3, 3))
except zo.ConfigError as error:
    print(error)
"""
    error = in_new_process(script, ZEROOFFLOAD_CPU_TARGET="fast")
    assert error.startswith("ZEROOFFLOAD_CPU_TARGET='fast' is not a CPU target")
    assert ", ".join(n.supported_targets()) in error


def test_a_forked_child_goes_on_alone() -> None:
    """As a data loader's worker might."""
    script = """
import os, warnings
import numpy as np
warnings.simplefilter("ignore")  # Python 3.12 and newer dislike any fork beside threads
pool = n.ThreadPool(2)
def works():
    target, source = np.zeros(64 * 4096, np.float32), np.ones(64 * 4096, np.float32)
    sums, fp32 = np.zeros(64), n.Dtype.float32
    n.arrive(
        pool, n.Arrival.add, target.ctypes.data, fp32, source.ctypes.data, fp32, target.size, sums.ctypes.data
    )
    return bool((target == 1).all() and (sums == 4096).all())
assert works()
child = os.fork()
if child == 0:
    status = 0 if works() else 1
    del pool
    os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert works()
"""
    in_new_process(script)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The text that makes one."""
    if request.param.startswith("Uring"):
        try:
            n.UringEngine(1, 4096).close()
        except OSError as error:
            pytest.skip(f"no io_uring here: {error}")
    return f"n.{request.param}"


def test_an_engine_is_refused_in_a_forked_child(engine: str) -> None:
    script = f"""
import os, warnings
warnings.simplefilter("ignore")
engine = {engine}
ticket = engine.submit_read(0, 0, 0, 0)
child = os.fork()
if child == 0:
    status = 0
    for use in (engine.wait, engine.done, lambda ticket: engine.submit_read(0, 0, 0, 0)):
        try:
            use(ticket)
            status = 1
        except RuntimeError as error:
            status |= "belongs to process" not in str(error)
    engine.close()
    del engine
    os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
engine.wait(ticket)
"""
    in_new_process(script)


def test_the_interpreter_exits_in_silence_with_everything_alive(engine: str) -> None:
    script = f"""
import sys
pool, engine = n.ThreadPool(2), {engine}
sys.modules["keep"] = (pool, engine)
engine.submit_read(0, 0, 0, 0)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import zerooffload._native as n\n{script}"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == done.stderr == b""


def test_the_extension_needs_no_torch() -> None:
    """Loaded by path, so that no import of the package runs before it."""
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_native", {n.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.BLOCK_NUMEL == 4096
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=60)
