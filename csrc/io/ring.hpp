#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "io/transfer.hpp"

namespace zerooffload::io {

// An asynchronous interface to the kernel, as a seam: tests put scripted faults here.
//
// 1. `prepare` up to `num_entries` operations that are not yet complete.
// 2. `submit_and_wait` hands them over, and sleeps until an operation is complete or `wake` was called.
// 3. `next`, until there is none, gives the completed ones, in any order.
// One thread makes and uses a ring and destroys it; `wake` alone may be called by any.
class Ring {
 public:
  enum class Issue {
    kAtOnce,    // in the submitting thread, as far as that does not block
    kOnWorker,  // in a thread of the kernel, which may block
  };
  struct Entry {
    std::uint32_t id;  // comes back with the completion
    Operation operation;
    Extent extent;  // at most kMostPieceNbytes
    int buffer;     // of the registered one that holds all of the extent; kUnregistered
    Issue issue;
  };
  struct Completion {
    std::uint32_t id;
    std::int64_t result;  // bytes moved (0 for a flush), or minus an errno
  };
  struct Entered {
    std::uint32_t num_accepted;  // of the prepared ones, in order, that are now the kernel's
    int error;                   // an errno, or 0
  };
  static constexpr int kUnregistered = -1;

  virtual ~Ring() = default;
  virtual void prepare(const Entry& entry) = 0;
  virtual Entered submit_and_wait() = 0;
  virtual bool next(Completion* completion) = 0;
  virtual void wake() = 0;

  // Keeps the pages of a range, of at most kMostBufferNbytes, under this number. Returns 0 or an errno.
  virtual int register_buffer(int buffer, std::byte* data, std::int64_t nbytes) = 0;
  static constexpr int kMostBuffers = 1024;
  static constexpr std::int64_t kMostBufferNbytes = std::int64_t{1} << 30;
};

using OpenRing = std::function<std::unique_ptr<Ring>(std::uint32_t num_entries)>;

// Linux's io_uring. std::system_error where there is none, or it may not be used.
std::unique_ptr<Ring> open_kernel_ring(std::uint32_t num_entries);

}  // namespace zerooffload::io
