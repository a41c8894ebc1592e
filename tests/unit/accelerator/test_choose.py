from __future__ import annotations

import pytest
import torch

from zerooffload import ConfigError
from zerooffload.accelerator import use_device_of


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was, of three devices."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


def test_each_rank_of_a_machine_has_a_device(chosen: list[int]) -> None:
    for rank in range(3):
        use_device_of(rank)
    assert chosen == [0, 1, 2]


def test_more_ranks_than_devices_are_refused(chosen: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 3, and this machine has 3 CUDA devices.*nproc-per-node=3"):
        use_device_of(3)
    assert chosen == []


@pytest.mark.parametrize("num_devices", [0, 1])
def test_nothing_is_chosen_where_there_is_no_choice(
    num_devices: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    use_device_of(1)
    assert chosen == []
