"""The checksum of what lies on files: XXH3-64 (github.com/Cyan4973/xxHash, its specification 0.1.1), seed 0."""

from __future__ import annotations

import torch
import xxhash


def checksum(memory: torch.Tensor) -> int:
    """Of a contiguous uint8 tensor in host memory, an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(memory.numpy().data)
