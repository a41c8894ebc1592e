#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.hpp"

namespace zerooffload::optim {

// An array of a pass: how many bytes each element has in it, and whether they are written back.
struct Stream {
  void* bytes;
  std::int64_t item_bytes;
  bool written;
};

// Reads and writes what a pass over these arrays would, tile by tile and with as many threads, and computes
// nothing: the least that the pass could take. `numel` is cut to a multiple of 1024; arrays lie on 8 bytes
// (std::invalid_argument otherwise) and keep their contents.
void move_traffic(ThreadPool& pool, const std::vector<Stream>& streams, std::int64_t numel);

}  // namespace zerooffload::optim
