#pragma once

#include <cstdint>

#include "io/engine.hpp"
#include "io/transfer.hpp"

namespace zerooffload::io {

// An engine of pread, pwrite and fdatasync: one piece at a time on each of its threads.
class ThreadEngine : public Engine {
 public:
  explicit ThreadEngine(int num_threads, std::int64_t piece_nbytes = kMostPieceNbytes,
                        const SystemCalls& calls = kSystemCalls);
};

}  // namespace zerooffload::io
