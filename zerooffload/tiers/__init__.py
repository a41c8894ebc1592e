"""Where a shard's states can live, behind one protocol; nobody above asks which tier it is."""

from zerooffload.tiers.api import Block, Kept, Space, Tier
from zerooffload.tiers.device_tier import DeviceTier
from zerooffload.tiers.directory import RunDirectory
from zerooffload.tiers.memory_tier import MemoryTier, host_tier
from zerooffload.tiers.mirrored import MirroredBlock
from zerooffload.tiers.nvme import ChunkPlace, NvmeBlock, NvmeTier
from zerooffload.tiers.records import FILE_ALIGNMENT_BYTES, Part, RecordLayout, dtype_name
from zerooffload.tiers.slots import SlotState, SlotTable
from zerooffload.tiers.staging import StagingRing, StagingSlot
from zerooffload.tiers.transfers import Transfers

__all__ = [
    "FILE_ALIGNMENT_BYTES",
    "Block",
    "ChunkPlace",
    "DeviceTier",
    "Kept",
    "MemoryTier",
    "MirroredBlock",
    "NvmeBlock",
    "NvmeTier",
    "Part",
    "RecordLayout",
    "RunDirectory",
    "SlotState",
    "SlotTable",
    "Space",
    "StagingRing",
    "StagingSlot",
    "Tier",
    "Transfers",
    "dtype_name",
    "host_tier",
]
