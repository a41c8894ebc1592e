"""Without the native module the package trains too: slower, with one message, to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerooffload import native

TRAIN = """
import json, logging, sys
from pathlib import Path

if sys.argv[2] == "blocked":
    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name == "zerooffload._native":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Blocker())

messages = []
class Keep(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())
logging.getLogger("zerooffload").addHandler(Keep())

import torch
import zerooffload as zo
from zerooffload import native

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.GELU(), torch.nn.Linear(50, 3))
path = Path(sys.argv[1])
homes = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
settings = {"compute_dtype": sys.argv[3], "accumulation_steps": 2}
zo.offload(model, zo.OffloadConfig(**homes, nvme_paths=[path], host_memory="64MiB", **settings))
optimizer = zo.AdamW(model.parameters(), lr=0.01)
losses = []
for step in range(4):
    for part in range(2):
        inputs = torch.sin(torch.arange(80).reshape(2, 40) * (step + part + 1)).to(model[0].weight.dtype)
        loss = model(inputs).float().square().mean()
        loss.backward()
    zo.clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()).hex())
values = {name: value.float().sum().item().hex() for name, value in model.state_dict().items()}
zo.close(model)
print(json.dumps({
    "available": native.available, "losses": losses, "values": values, "messages": messages,
    "left": sorted(entry.name for entry in path.rglob("*") if entry.is_file()),
}))
"""


def train(path: Path, how: str, dtype: str) -> dict[str, Any]:
    path.mkdir()
    command = [sys.executable, "-P", "-W", "error", "-c", TRAIN, str(path), how, dtype]
    result = subprocess.run(command, cwd=path.parent, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_without_the_native_module_gives_the_same_bits_and_says_so(tmp_path: Path, dtype: str) -> None:
    blocked = train(tmp_path / "blocked", "blocked", dtype)
    assert not blocked["available"]
    assert blocked["left"] == ["manifest.json", "record-0.bin", "record-1.bin", "states.bin"]
    assert all("built without its native module" in message for message in blocked["messages"])
    assert len(blocked["messages"]) == 1
    if not native.available:
        pytest.skip(f"nothing to compare with: {native.why_unavailable}")
    with_native = train(tmp_path / "native", "native", dtype)
    assert with_native["available"]
    assert with_native["messages"] == []
    assert blocked["losses"] == with_native["losses"]
    assert blocked["values"] == with_native["values"]
