#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace zerooffload {

// A fork-join pool: `run` hands out numbered parts and returns when all of them are done.
//
// The calling thread counts as one of `num_threads`. It does parts itself, and the pool's threads those that
// they come to: who finds its core taken by others, or sleeps still, delays no more than the part it has
// begun. Calls from several threads do not wait for each other; the pool's threads help the newest, part by
// part. In a forked child the workers do not exist: there `run` does all parts on the calling thread.
class ThreadPool {
 public:
  using Task = void (*)(void* context, int part) noexcept;

  // `cores`: where its threads may run; all cores if empty. The calling thread is left where it is.
  // std::invalid_argument if num_threads < 1.
  explicit ThreadPool(int num_threads, const std::vector<int>& cores = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept { return num_threads_; }

  // Calls task(context, part) once for each part in [0, num_parts), in any order.
  void run(int num_parts, Task task, void* context);

 private:
  class Workers;
  int num_threads_;
  pid_t owner_;
  std::unique_ptr<Workers> workers_;  // null for one thread
};

// Calls body(first_block, end_block) over [0, num_blocks), cut into some contiguous ranges a thread.
//
// The cut falls between blocks and nowhere else. A body whose result for a block depends on that block alone
// therefore gives the same bits for every number of threads.
template <typename Body>
void for_block_ranges(ThreadPool& pool, std::int64_t num_blocks, Body&& body) {
  // Below this a range is done sooner than a sleeping thread wakes up (some 50 us; 16 blocks are 64 Ki
  // elements).
  constexpr std::int64_t kMinBlocksPerPart = 16;
  // So that threads of which some are interrupted are done at nearly the same time.
  constexpr std::int64_t kPartsPerThread = 8;

  struct Call {
    Body& body;
    std::int64_t num_blocks;
    std::int64_t num_parts;
  } call{body, num_blocks, num_blocks / kMinBlocksPerPart};
  const std::int64_t most = pool.num_threads() > 1 ? kPartsPerThread * pool.num_threads() : 1;
  if (call.num_parts > most) call.num_parts = most;
  if (call.num_parts <= 1) {
    if (num_blocks > 0) body(std::int64_t{0}, num_blocks);
    return;
  }
  const ThreadPool::Task task = [](void* context, int part) noexcept {
    Call& whole = *static_cast<Call*>(context);
    whole.body(whole.num_blocks * part / whole.num_parts, whole.num_blocks * (part + 1) / whole.num_parts);
  };
  pool.run(static_cast<int>(call.num_parts), task, &call);
}

}  // namespace zerooffload
