#pragma once

#include <cstdint>
#include <stdexcept>

#include "io/transfer.hpp"

namespace zerooffload::io {

// A request that did not move all of its bytes, or make them durable.
//
// `error` is the kernel's errno; for the end of the file, which has none, EIO, and the message says so.
// `transferred` counts the bytes from the start of the request that were moved for certain.
class IoFailure : public std::runtime_error {
 public:
  IoFailure(Operation operation, const Extent& extent, const Outcome& outcome);

  Operation operation;
  int error;
  int fd;
  std::int64_t offset;
  std::int64_t length;
  std::int64_t transferred;
};

// A ticket that was never given out, or was waited for already.
class UnknownTicket : public std::out_of_range {
  using std::out_of_range::out_of_range;
};

}  // namespace zerooffload::io
