#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace zerooffload::io {

// A flush makes what was written to its file durable; it has a descriptor and no bytes.
enum class Operation { kRead, kWrite, kFlush };

const char* operation_name(Operation operation) noexcept;  // "read", "write", "flush"

// The calls that move bytes and make them durable, as a seam: tests put scripted faults here.
struct SystemCalls {
  ssize_t (*pread)(int fd, void* data, std::size_t nbytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* data, std::size_t nbytes, off_t offset);
  int (*flush)(int fd) = default_flush;

  static int default_flush(int fd) noexcept;  // fdatasync, or the nearest that the system has
};
extern const SystemCalls kSystemCalls;

// Bytes of one file and of one buffer. The buffer is the caller's until the transfer is over.
struct Extent {
  int fd;
  std::int64_t offset;
  std::byte* data;
  std::int64_t nbytes;
};

// How far a transfer came, and why it went no further.
struct Outcome {
  std::int64_t transferred = 0;
  int error = 0;  // an errno; kEndOfFile for a read that met the end of the file; 0 if all bytes were moved
};

// Not an errno: the file ended before the extent did.
constexpr int kEndOfFile = -1;

// Moves the whole extent, resuming after interruptions and short transfers; or flushes its file.
//
// A failed flush is not repeated: the kernel tells of a lost write once, and the next flush would succeed.
// What is left after a short transfer is asked for as it is. Under O_DIRECT the kernel may refuse such a
// rest, if it does not start on the device's block size, with EINVAL; that is then the outcome, with the
// bytes moved before.
Outcome transfer(Operation operation, const Extent& extent, const SystemCalls& calls) noexcept;

}  // namespace zerooffload::io
