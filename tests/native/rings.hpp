#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "io/ring.hpp"

// A ring without a kernel: operations happen when they are handed over, and are complete in any order.
class SimulatedRing final : public zerooffload::io::Ring {
 public:
  void prepare(const Entry& entry) override;
  Entered submit_and_wait() override;
  bool next(Completion* completion) override;
  void wake() override;
  int register_buffer(int buffer, std::byte* data, std::int64_t nbytes) override;

 private:
  void perform(const Entry& entry);

  std::mt19937 random_{7};
  std::deque<Entry> prepared_;
  std::vector<Completion> completions_;
  std::vector<zerooffload::io::Extent> buffers_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool is_woken_ = false;
};

// What a scripted ring does to the operations of another ring, and to being entered. Called by the engine's
// thread alone.
struct Script {
  // Moves at most this many bytes, or completes with minus this errno and does nothing.
  std::function<std::int64_t(const zerooffload::io::Ring::Entry&)> operation =
      [](const zerooffload::io::Ring::Entry& entry) { return entry.extent.nbytes; };
  // Enters the ring (0), or fails with this errno.
  std::function<int()> enter = [] { return 0; };
};

zerooffload::io::OpenRing simulated();
zerooffload::io::OpenRing scripted(const zerooffload::io::OpenRing& inner, const Script& script);

// Whether io_uring can be used here.
bool has_kernel_ring();
