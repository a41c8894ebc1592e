"""Letting files share their blocks, where the file system can: btrfs, xfs and others."""

from __future__ import annotations

import fcntl
import struct

from zerooffload.aio.api import OpenFile

# _IOW(0x94, 13, struct file_clone_range) of linux/fs.h.
_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("=qQQQ")


def clone_range(source: OpenFile, source_offset_bytes: int, target: OpenFile, offset_bytes: int, nbytes: int) -> bool:
    """Let `target` have what a range of `source` holds, without moving it; whoever writes to one of them does so alone.

    False if that cannot be done, as on most file systems, between two of them, and for ranges that are not of whole
    blocks: then nothing has changed.
    """
    try:
        fcntl.ioctl(target.fd, _FICLONERANGE, _RANGE.pack(source.fd, source_offset_bytes, nbytes, offset_bytes))
    except OSError:
        return False
    return True
