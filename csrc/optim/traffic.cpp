#include "optim/traffic.hpp"

#include <atomic>

#include "optim/launch.hpp"

namespace zerooffload::optim {
namespace {

constexpr std::int64_t kTileNumel = 1024;

// Not known to the compiler, which could leave out writing back what was read.
std::atomic<std::uint64_t> zero{0};
std::atomic<std::uint64_t> sink{0};

}  // namespace

void move_traffic(ThreadPool& pool, const std::vector<Stream>& streams, std::int64_t numel) {
  for (const Stream& stream : streams) check_arguments({{"stream", stream.bytes, 8}}, numel);
  const KernelTable& kernels = active_kernels();
  const std::uint64_t nothing = zero.load(std::memory_order_relaxed);
  launch(pool, numel - numel % kTileNumel, [&](std::int64_t begin, std::int64_t end) {
    std::uint64_t all = 0;
    for (std::int64_t start = begin; start < end; start += kTileNumel) {
      for (const Stream& stream : streams) {
        char* const bytes = static_cast<char*>(stream.bytes) + start * stream.item_bytes;
        const std::int64_t num_words = kTileNumel * stream.item_bytes / 8;
        if (stream.written) {
          kernels.rewrite(bytes, num_words, nothing);
        } else {
          all |= kernels.scan(bytes, num_words);
        }
      }
    }
    sink.fetch_or(all & 1, std::memory_order_relaxed);
  });
}

}  // namespace zerooffload::optim
