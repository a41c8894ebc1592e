#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/thread_pool.hpp"
#include "check.hpp"

using zerooffload::for_block_ranges;
using zerooffload::ThreadPool;

namespace {

// How often each block was visited.
std::vector<int> visits(ThreadPool& pool, std::int64_t num_blocks) {
  std::vector<int> counts(static_cast<std::size_t>(num_blocks), 0);
  for_block_ranges(pool, num_blocks, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t block = first; block < end; ++block) ++counts[static_cast<std::size_t>(block)];
  });
  return counts;
}

bool each_once(ThreadPool& pool, std::int64_t num_blocks) {
  for (const int count : visits(pool, num_blocks)) {
    if (count != 1) return false;
  }
  return true;
}

// False if it does not come true in time.
template <typename Condition>
bool wait_until(Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

TEST(pool_refuses_zero_threads) {
  const std::string message = CHECK_THROWS(std::invalid_argument, ThreadPool(0));
  CHECK_EQUAL(message, "num_threads: expected at least 1, got 0");
}

TEST(pool_covers_each_block_once) {
  for (int num_threads = 1; num_threads <= 5; ++num_threads) {
    ThreadPool pool(num_threads);
    CHECK_EQUAL(pool.num_threads(), num_threads);
    for (const std::int64_t num_blocks : {0, 1, 15, 16, 31, 32, 33, 63, 64, 79, 80, 81, 1000}) {
      CHECK(each_once(pool, num_blocks));
    }
  }
}

TEST(pool_uses_its_threads) {
  ThreadPool pool(3);
  struct Parts {
    std::thread::id ids[3];
    std::atomic<int> num_begun{0};
  } parts;
  const ThreadPool::Task task = [](void* context, int part) noexcept {
    Parts& all = *static_cast<Parts*>(context);
    all.ids[part] = std::this_thread::get_id();
    ++all.num_begun;
    wait_until([&] { return all.num_begun == 3; });
  };
  pool.run(3, task, &parts);
  CHECK(parts.ids[0] != parts.ids[1]);
  CHECK(parts.ids[1] != parts.ids[2]);
  CHECK(parts.ids[0] != parts.ids[2]);
}

TEST(pool_lets_no_caller_wait_for_another) {
  ThreadPool pool(2);
  struct Calls {
    std::atomic<int> num_begun{0};
    std::atomic<bool> second_is_over{false};
    std::atomic<bool> first_waited{true};
  } calls;
  std::thread first([&] {
    const ThreadPool::Task until_second_is_over = [](void* context, int) noexcept {
      Calls& both = *static_cast<Calls*>(context);
      ++both.num_begun;
      if (!wait_until([&] { return both.second_is_over.load(); })) both.first_waited = false;
    };
    pool.run(2, until_second_is_over, &calls);
  });
  // All threads of the pool are in the first call.
  CHECK(wait_until([&] { return calls.num_begun == 2; }));
  CHECK(each_once(pool, 100));
  calls.second_is_over = true;
  first.join();
  CHECK(calls.first_waited);
}

TEST(pool_survives_many_short_runs) {
  ThreadPool pool(4);
  std::atomic<int> total{0};
  const ThreadPool::Task task = [](void* context, int) noexcept {
    ++*static_cast<std::atomic<int>*>(context);
  };
  int expected = 0;
  for (int i = 0; i < 3000; ++i) {
    pool.run(1 + i % 4, task, &total);
    expected += 1 + i % 4;
  }
  CHECK_EQUAL(total.load(), expected);
}

TEST(pool_serves_several_callers) {
  ThreadPool pool(3);
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        if (!each_once(pool, 100)) ++num_wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQUAL(num_wrong.load(), 0);
}

TEST(pool_works_in_a_forked_child) {
  ThreadPool pool(3);
  CHECK(each_once(pool, 100));
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    {
      ThreadPool own(1);
      status = each_once(pool, 100) && each_once(own, 100) ? 0 : 1;
    }
    ::_exit(status);
  }
  int status = -1;
  CHECK_EQUAL(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
  CHECK(each_once(pool, 100));
}

TEST(pool_can_be_destroyed_in_a_forked_child) {
  auto pool = std::make_unique<ThreadPool>(3);
  const pid_t child = ::fork();
  if (child == 0) {
    pool.reset();
    ::_exit(0);
  }
  int status = -1;
  CHECK_EQUAL(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
