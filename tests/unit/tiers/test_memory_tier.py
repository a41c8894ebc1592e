from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zerooffload import BudgetError
from zerooffload.accelerator.cpu import CpuAccelerator
from zerooffload.config import TierName
from zerooffload.memory import Budget
from zerooffload.telemetry.recorder import CountingRecorder
from zerooffload.tiers import DeviceTier, MemoryTier, Part, RecordLayout, Space, Transfers, host_tier

MakeTier = Callable[[Budget, CpuAccelerator, Transfers], MemoryTier]


class SeparateDevice(CpuAccelerator):
    """A CPU that claims to have memory of its own."""

    shares_host_memory = False


@pytest.fixture(params=[host_tier, DeviceTier])
def make_tier(request: pytest.FixtureRequest) -> MakeTier:
    return request.param


def test_a_block_takes_what_is_announced_and_gives_it_back(
    make_tier: MakeTier, budget: Budget, accelerator: CpuAccelerator, transfers: Transfers, layout: RecordLayout
) -> None:
    tier = make_tier(budget, accelerator, transfers)
    tier.allocate(layout, "optimizer state")
    tier.reserve()
    assert budget.leased_bytes == tier.block_nbytes(layout) == 81_920
    assert budget.holders() == {"optimizer state": 81_920}
    tier.close()
    tier.close()
    assert budget.leased_bytes == 0


def test_a_block_that_does_not_fit_is_refused(
    make_tier: MakeTier, accelerator: CpuAccelerator, transfers: Transfers, layout: RecordLayout
) -> None:
    tier = make_tier(Budget("tier", 81_919), accelerator, transfers)
    with pytest.raises(BudgetError, match="gradients"):
        tier.allocate(layout, "gradients")
    assert tier.budget.leased_bytes == 0


def test_an_empty_block_takes_nothing(
    make_tier: MakeTier, budget: Budget, accelerator: CpuAccelerator, transfers: Transfers
) -> None:
    tier = make_tier(budget, accelerator, transfers)
    tier.allocate(RecordLayout((Part("param", torch.float32),), 0, 4096), "parameters")
    assert budget.leased_bytes == 0


def test_on_a_cpu_both_spaces_see_the_state_itself(
    make_tier: MakeTier, budget: Budget, accelerator: CpuAccelerator, transfers: Transfers, layout: RecordLayout
) -> None:
    block = make_tier(budget, accelerator, transfers).allocate(layout, "x")
    for chunk in range(layout.num_chunks):
        host, device = block.view(Space.HOST, chunk), block.view(Space.DEVICE, chunk)
        assert host is not None
        assert device is not None
        host.fill_(chunk + 1)
        assert int(device.min()) == int(device.max()) == chunk + 1
        assert device.numel() == layout.record_nbytes(chunk)
    whole = block.whole(Space.DEVICE)
    assert whole is not None
    assert int(whole.sum()) == sum((chunk + 1) * layout.record_nbytes(chunk) for chunk in range(layout.num_chunks))


@pytest.mark.parametrize(
    ("make", "seen_by", "hidden_from"),
    [(host_tier, Space.HOST, Space.DEVICE), (DeviceTier, Space.DEVICE, Space.HOST)],
)
def test_with_memory_of_its_own_each_space_sees_its_own_tier(
    make: MakeTier, seen_by: Space, hidden_from: Space, budget: Budget, transfers: Transfers
) -> None:
    tier = make(budget, SeparateDevice(), transfers)
    block = tier.allocate(RecordLayout((Part("param", torch.float32),), 100, 4096), "x")
    assert tier.name is TierName(seen_by.value)
    assert block.view(seen_by, 0) is not None
    assert block.view(hidden_from, 0) is None
    assert block.whole(hidden_from) is None


def test_records_travel_and_are_counted(
    budget: Budget,
    accelerator: CpuAccelerator,
    transfers: Transfers,
    recorder: CountingRecorder,
    layout: RecordLayout,
) -> None:
    block = DeviceTier(budget, accelerator, transfers).allocate(layout, "x")
    last = layout.num_chunks - 1
    source = torch.arange(layout.file_nbytes(last)).to(torch.uint8)
    target = torch.zeros_like(source)
    block.write(last, source).wait()
    block.read(last, target).wait()
    length = layout.record_nbytes(last)
    assert torch.equal(target[:length], source[:length])
    assert not target[length:].any()
    moved = recorder.take().bytes_moved
    assert (moved["copy_in"], moved["copy_out"]) == (length, length)
