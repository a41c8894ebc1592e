"""A profile beside the memory that a process really takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from zerooffload.integrations.huggingface import ModelSource, profile_language_model

pytest.importorskip("transformers")

FIELDS: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
SHAPE = (8, 128)

IN_A_FRESH_PROCESS = """
import json, sys
import torch
from zerooffload.integrations.huggingface import ModelSource, next_token_loss, random_model
from zerooffload.planner.byteless import let_gradients_go
from zerooffload.telemetry import process_peak_bytes
from zerooffload.train.process import give_freed_memory_back, resident_bytes_trimmed, warm_up

fields, shape = json.loads(sys.argv[1])
give_freed_memory_back()
model = random_model(ModelSource(config=fields))
let_gradients_go(model)

def train(*shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    next_token_loss(model, tokens, tokens).backward()

warm_up()
train(1, 8)
before = resident_bytes_trimmed()
train(*shape)
print(process_peak_bytes() - before)
"""


def test_a_process_grows_by_what_the_profile_says() -> None:
    told = json.dumps((FIELDS, SHAPE))
    command = [sys.executable, "-P", "-W", "ignore", "-c", IN_A_FRESH_PROCESS, told]
    grown = int(subprocess.check_output(command, text=True))
    profile = profile_language_model(ModelSource(config=FIELDS), batch_size=SHAPE[0], sequence_length=SHAPE[1])
    assert profile.peak_nbytes > 80e6
    assert grown == pytest.approx(profile.peak_nbytes, rel=0.1)
