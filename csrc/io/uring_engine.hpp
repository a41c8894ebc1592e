#pragma once

#include <cstdint>

#include "io/engine.hpp"
#include "io/ring.hpp"

namespace zerooffload::io {

// An engine of one io_uring and one thread, which sleeps in the kernel until there is something to submit or
// something has ended.
//
// The thread is the ring's only user: operations then neither end with the thread that asked for them nor
// interrupt it, whatever that is doing, and short ones are resumed although nobody waits.
class UringEngine : public Engine {
 public:
  // At most `num_entries` pieces are with the kernel at a time. std::system_error if io_uring cannot be used.
  UringEngine(int num_entries, std::int64_t piece_nbytes, const OpenRing& open_ring = open_kernel_ring);
};

}  // namespace zerooffload::io
