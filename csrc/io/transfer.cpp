#include "io/transfer.hpp"

#include <unistd.h>

#include <cerrno>

namespace zerooffload::io {

const SystemCalls kSystemCalls{::pread, ::pwrite};

int SystemCalls::default_flush(int fd) noexcept {
#if defined(__linux__)
  return ::fdatasync(fd);
#else
  return ::fsync(fd);
#endif
}

namespace {

Outcome flush(int fd, const SystemCalls& calls) noexcept {
  while (calls.flush(fd) != 0) {
    if (errno != EINTR) return Outcome{0, errno};
  }
  return {};
}

}  // namespace

const char* operation_name(Operation operation) noexcept {
  switch (operation) {
    case Operation::kRead:
      return "read";
    case Operation::kWrite:
      return "write";
    case Operation::kFlush:
      break;
  }
  return "flush";
}

Outcome transfer(Operation operation, const Extent& extent, const SystemCalls& calls) noexcept {
  if (operation == Operation::kFlush) return flush(extent.fd, calls);
  Outcome outcome;
  while (outcome.transferred < extent.nbytes) {
    std::byte* const data = extent.data + outcome.transferred;
    const auto nbytes = static_cast<std::size_t>(extent.nbytes - outcome.transferred);
    const off_t offset = extent.offset + outcome.transferred;
    const ssize_t moved = operation == Operation::kRead ? calls.pread(extent.fd, data, nbytes, offset)
                                                        : calls.pwrite(extent.fd, data, nbytes, offset);
    if (moved > 0) {
      outcome.transferred += moved;
    } else if (moved == 0) {
      // A write of nothing is no end of file, but asking again might never end.
      outcome.error = operation == Operation::kRead ? kEndOfFile : EIO;
      return outcome;
    } else if (errno != EINTR) {
      outcome.error = errno;
      return outcome;
    }
  }
  return outcome;
}

}  // namespace zerooffload::io
