"""Kernels and I/O of zerooffload, without torch.

Addresses are plain integers (`tensor.data_ptr()`): the caller keeps the memory alive and of the right size
until the call has returned or, for I/O, until the ticket was waited for. Kernels work in place on arrays that
do not overlap and lie on multiples of their item size, else ValueError. Every call that works or waits
releases the GIL. Kernel results are the same bits for every CPU target, number of threads and alignment (but
for the payload of a NaN made from two NaNs).
"""

import enum
from typing import Literal, final

BLOCK_NUMEL: int
"""Elements that one square sum covers: 4096."""

@final
class Dtype(enum.Enum):
    """Item types that the kernels know."""

    float32 = 0
    bfloat16 = 1

def supported_targets() -> list[str]:
    """CPU targets of this build that this CPU can run, best last: `["baseline", "avx2"]`."""

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

    In a forked child it goes on working, on the calling thread alone.
    """

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

@final
class AdamWScalars:
    """Factors of one AdamW step: computed in double by the caller, rounded once to float32 here."""

    def __init__(
        self,
        *,
        grad_factor: float,
        decay: float,
        beta1: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        bias2_sqrt: float,
        eps: float,
        step_size: float,
    ) -> None: ...
    @property
    def grad_factor(self) -> float:
        """Unscaling and clipping of the gradient, in one factor."""
    @property
    def decay(self) -> float:
        """`1 - lr * weight_decay`."""
    @property
    def beta1(self) -> float: ...
    @property
    def one_minus_beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def one_minus_beta2(self) -> float: ...
    @property
    def bias2_sqrt(self) -> float:
        """`sqrt(1 - beta2**t)`."""
    @property
    def eps(self) -> float: ...
    @property
    def step_size(self) -> float:
        """`lr / (1 - beta1**t)`."""

def adamw_fp32(
    pool: ThreadPool,
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: Dtype,
    numel: int,
    scalars: AdamWScalars,
) -> None:
    """One fused AdamW pass over float32 parameters, in place; each operation rounds once, in this order.

    `g = grad * grad_factor; p = p * decay;`
    `m = beta1*m + one_minus_beta1*g; v = beta2*v + one_minus_beta2*(g*g);`
    `d = sqrt(v)/bias2_sqrt + eps; p = p - step_size*(m/d)`
    """

def adamw_bf16(
    pool: ThreadPool,
    param: int,
    remainder: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: Dtype,
    numel: int,
    scalars: AdamWScalars,
) -> None:
    """Do the same step on the float32 masters that bfloat16 parameters and int16 remainders make together."""

def split_fp32(pool: ThreadPool, source: int, param: int, remainder: int, numel: int) -> None:
    """Split float32 into bfloat16 and int16 remainder: bits = (param << 16) + remainder, ties away from zero.

    Exact for all but NaNs, which become 0x7FC00000.
    """

def join_fp32(pool: ThreadPool, param: int, remainder: int, target: int, numel: int) -> None:
    """Join bfloat16 and int16 remainder to float32: the inverse of `split_fp32`."""

def square_sums(pool: ThreadPool, grad: int, grad_dtype: Dtype, numel: int, out: int) -> None:
    """Write the sum of squares of each block of 4096 elements to `out`, float64 [ceil(numel / 4096)].

    In a block, lane j of 16 adds the squares of elements j, j + 16, ... in rising order; then lanes j and j +
    8 are added, then j and j + 4, and so on to one.
    """

def accumulate(pool: ThreadPool, target: int, source: int, dtype: Dtype, numel: int) -> None:
    """`target += source`, both of `dtype`; bfloat16 is rounded to nearest even from the float32 sum."""

class IoFailure(Exception):  # noqa: N818 - a request failed; the error for users is TierIOError
    """A request that did not move all of its bytes.

    Attributes
    ----------
    errno : int
        The kernel's error number. EIO (and a message that says so) for a read that met the end of the file.
    op : str
        "read" or "write".
    fd, offset, length : int
        The request as submitted, offset and length in bytes.
    transferred : int
        Bytes from the start of the request that were moved for certain.
    """

    errno: int
    op: Literal["read", "write"]
    fd: int
    offset: int
    length: int
    transferred: int

@final
class ThreadEngine:
    """Moves bytes between files and memory with pread and pwrite, on threads of its own.

    Buffer and descriptor of a request must stay valid until its ticket was waited for or `close` returned.
    Nothing orders two requests but waiting. Interruptions and short transfers are resumed; under O_DIRECT the
    rest of a short transfer may be refused by the kernel, which is reported as EINVAL. In a forked child
    every call but `close` raises RuntimeError.
    """

    def __init__(self, num_threads: int) -> None: ...
    def submit_read(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Queue a read into memory and return its ticket at once; RuntimeError after `close`."""
    def submit_write(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Queue a write from memory and return its ticket at once; RuntimeError after `close`."""
    def wait(self, ticket: int) -> None:
        """Wait for a ticket, exactly once: IoFailure if its transfer failed, KeyError for an unknown ticket.

        If a signal handler raises (Ctrl-C), the ticket stays valid: the transfer is still under way.
        """
    def done(self, ticket: int) -> bool:
        """Whether a ticket's transfer is over; the ticket stays valid. KeyError for an unknown one."""
    def close(self) -> None:
        """Finish what was submitted and end the threads. Tickets can still be waited for. Idempotent."""
