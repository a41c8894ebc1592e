"""Where a shard's states can live, behind one protocol; nobody above asks which tier it is."""

from zerooffload.tiers.api import Block, Space, Tier
from zerooffload.tiers.memory_tier import MemoryTier, device_tier, host_tier
from zerooffload.tiers.nvme import NvmeTier
from zerooffload.tiers.records import FILE_ALIGNMENT_BYTES, Part, RecordLayout
from zerooffload.tiers.staging import StagingRing, StagingSlot
from zerooffload.tiers.transfers import Transfers

__all__ = [
    "FILE_ALIGNMENT_BYTES",
    "Block",
    "MemoryTier",
    "NvmeTier",
    "Part",
    "RecordLayout",
    "Space",
    "StagingRing",
    "StagingSlot",
    "Tier",
    "Transfers",
    "device_tier",
    "host_tier",
]
