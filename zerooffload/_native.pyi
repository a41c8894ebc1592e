"""Kernels and I/O of zerooffload, without torch.

Addresses are plain integers (`tensor.data_ptr()`): the caller keeps the memory alive and of the right size
until the call has returned or, for I/O, until the ticket was waited for. Kernels work in place on arrays that
do not overlap and lie on multiples of their item size, else ValueError. Every call that works or waits
releases the GIL. Kernel results are the same bits for every CPU target, number of threads and alignment (but
for the sign and the payload of a NaN).
"""

import enum
from collections.abc import Sequence
from typing import Literal, final

BLOCK_NUMEL: int
"""Elements that one square sum covers: 4096."""
SCALE_BLOCK_NUMEL: int
"""Elements that share a scale where moments are kept in 8 bits: 128."""

@final
class Dtype(enum.Enum):
    """Item types that the kernels know."""

    float32 = 0
    bfloat16 = 1
    float16 = 2

def supported_targets() -> list[str]:
    """CPU targets of this build that this CPU can run, best last: `["baseline", "avx2", "avx512"]`."""

def active_target() -> str:
    """Return the CPU target in use: the best one, or that named by ZEROOFFLOAD_CPU_TARGET.

    The variable is read once, at the first use of a kernel or of this function. A name that is unknown or not
    supported here raises ValueError, from this function and from every kernel.
    """

def set_target(name: str) -> None:
    """Change the CPU target of the whole process; ValueError if it is unknown or not supported here."""

@final
class ThreadPool:
    """A fork-join pool. The calling thread counts as one of its threads; calls from several threads take
    turns.

    In a forked child it goes on working, on the calling thread alone. `cores`: where its threads may run (the
    calling one is left where it is); all cores if empty.
    """

    def __init__(self, num_threads: int, cores: Sequence[int] = ...) -> None: ...
    @property
    def num_threads(self) -> int: ...

@final
class Rule(enum.Enum):
    """What an optimizer does to one element; `zerooffload.optim.rules` has the formulas."""

    adamw = 0
    adam = 1
    adagrad = 2
    lion = 3
    sgd = 4

@final
class MomentFormat(enum.Enum):
    """How moments are kept; block8: 8-bit codes, and a scale's exponent for each SCALE_BLOCK_NUMEL of them."""

    float32 = 0
    bfloat16 = 1
    block8 = 2

def step(
    pool: ThreadPool,
    rule: Rule,
    param: int,
    param_dtype: Dtype,
    companion: int,
    grad: int,
    grad_dtype: Dtype,
    moment_format: MomentFormat,
    moments: Sequence[tuple[int, int]],
    numel: int,
    scalars: Sequence[float],
    first_index: int,
    seed: int,
    param_origin: int = 0,
    record_origin: int = 0,
) -> None:
    """One pass of a rule, in place; each operation rounds once.

    With an origin, the old values lie that many bytes from the new ones: `param_origin` those of the parameters,
    `record_origin` those of the companion and the moments.

    `companion` is the int16 remainder of a bfloat16 parameter, the float32 master of a float16 one (which is
    written only), and 0 for float32. `moments` are the rule's (values, exponents), exponents 0 but for block8.
    `scalars` are the rule's, rounded to float32 here. `first_index` is the first element's in whatever the
    caller cuts, always on a multiple of SCALE_BLOCK_NUMEL for block8; with `seed` it decides how moments in
    fewer bits are rounded. ValueError for a wrong number of moments or scalars.
    """

def split_fp32(pool: ThreadPool, source: int, param: int, remainder: int, numel: int) -> None:
    """Split float32 into bfloat16 and int16 remainder: bits = (param << 16) + remainder, ties away from zero.

    Exact for all but NaNs, which become 0x7FC00000.
    """

def join_fp32(pool: ThreadPool, param: int, remainder: int, target: int, numel: int) -> None:
    """Join bfloat16 and int16 remainder to float32: the inverse of `split_fp32`."""

def square_sums(pool: ThreadPool, grad: int, grad_dtype: Dtype, numel: int, sums: int) -> None:
    """Write the sum of squares of each block of 4096 elements to `sums`, float64 [ceil(numel / 4096)].

    In a block, lane j of 16 adds the squares of elements j, j + 16, ... in rising order; then lanes j and j +
    8 are added, then j and j + 4, and so on to one. A sum is finite if and only if all its elements are.
    """

@final
class Arrival(enum.Enum):
    """What becomes of what a buffer holds when more arrives."""

    add = 0
    replace = 1

def arrive(
    pool: ThreadPool,
    arrival: Arrival,
    target: int,
    target_dtype: Dtype,
    source: int,
    source_dtype: Dtype,
    numel: int,
    sums: int,
) -> None:
    """In one pass: `target += source`, or `target = source`, rounded once, and the target's `square_sums` then.

    Both of one dtype, or a float32 target; ValueError otherwise.
    """

def exact_sum(values: int, numel: int) -> float:
    """Add float64 [numel] exactly and round once, as `math.fsum` does; ValueError for one below 0."""

def move_traffic(pool: ThreadPool, streams: Sequence[tuple[int, int, bool]], numel: int) -> None:
    """Read, and where wanted write back, `numel` items of each (address, item bytes, written); compute nothing.

    The least that a pass over these arrays could take. Addresses lie on 8 bytes; contents stay.
    """

class IoFailure(Exception):  # noqa: N818 - a request failed; the error for users is TierIOError
    """A request that did not move all of its bytes, or make them durable.

    Attributes
    ----------
    errno : int
        The kernel's error number. EIO (and a message that says so) for a read that met the end of the file.
    op : str
        "read", "write" or "flush".
    fd, offset, length : int
        The request as submitted, offset and length in bytes.
    transferred : int
        Bytes from the start of the request that were moved for certain.
    """

    errno: int
    op: Literal["read", "write", "flush"]
    fd: int
    offset: int
    length: int
    transferred: int

class Engine:
    """Moves bytes between files and memory, and makes them durable.

    Buffer and descriptor of a request must stay valid until its ticket was waited for or `close` returned. Large
    requests are cut into pieces. Nothing orders two requests but waiting. Interruptions and short transfers are
    resumed; under O_DIRECT the rest of a short transfer may be refused by the kernel, which is reported as EINVAL.
    In a forked child every call but `close` raises RuntimeError.
    """

    def submit_read(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Queue a read into memory and return its ticket at once; RuntimeError after `close`."""
    def submit_write(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Queue a write from memory and return its ticket at once; RuntimeError after `close`."""
    def submit_flush(self, fd: int) -> int:
        """Queue a flush and return its ticket at once; RuntimeError after `close`.

        What was written to the file before this call is durable once the ticket is over without a failure.
        """
    def wait(self, ticket: int, timeout_seconds: float = ...) -> float | None:
        """Wait for a ticket, and once it is over forget it; return when its last byte had moved, in seconds.

        None if it is not over after this time at most. The clock is that of `time.perf_counter` on Linux.

        IoFailure if its transfer failed, KeyError for an unknown ticket. If it is not over, or a signal handler
        raises (Ctrl-C), the ticket stays valid: the transfer is still under way.
        """
    def done(self, ticket: int) -> bool:
        """Whether a ticket's transfer is over; the ticket stays valid. KeyError for an unknown one."""
    def register_memory(self, address: int, nbytes: int) -> int:
        """Let the kernel keep the pages of a range until `close`; return 0, or an errno if it cannot.

        The range must not be unmapped, emptied or remapped before: I/O would go to the old pages and report success.
        """
    def close(self) -> None:
        """Finish what was submitted and end the threads. Tickets can still be waited for. Idempotent."""

@final
class ThreadEngine(Engine):
    """pread, pwrite and fdatasync, one piece at a time on each of its threads."""

    def __init__(self, num_threads: int, piece_nbytes: int = ...) -> None: ...

@final
class UringEngine(Engine):
    """io_uring, used by one thread that sleeps in the kernel; OSError where that is not to be had."""

    def __init__(self, num_entries: int, piece_nbytes: int) -> None: ...
