#include "base/thread_pool.hpp"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/worker_thread.hpp"

namespace zerooffload {

class ThreadPool::Workers {
 public:
  ~Workers() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      phase_ = Phase::kStopping;
    }
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Not in the constructor: should the system refuse the n-th thread, the destructor still joins those before
  // it.
  void start(int num_workers, const std::vector<int>& cores) {
    threads_.reserve(static_cast<std::size_t>(num_workers));
    for (int part = 1; part <= num_workers; ++part) {
      threads_.push_back(start_worker("zo-pool", [this, part] { serve(part); }));
      keep_on(threads_.back(), cores);
    }
  }

  void run(int num_parts, Task task, void* context) {
    const std::lock_guard<std::mutex> turn(turn_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = Job{task, context, num_parts};
      num_pending_ = num_parts - 1;
      ++generation_;
    }
    start_.notify_all();
    task(context, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return num_pending_ == 0; });
  }

 private:
  enum class Phase { kServing, kStopping };
  struct Job {
    Task task = nullptr;
    void* context = nullptr;
    int num_parts = 0;
  };

  // A worker that is not needed for a job may sleep through it: `run` waits only for those that are.
  void serve(int part) {
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return phase_ == Phase::kStopping || generation_ != seen; });
      if (phase_ == Phase::kStopping) return;
      seen = generation_;
      if (part >= job_.num_parts) continue;
      const Job job = job_;
      lock.unlock();
      job.task(job.context, part);
      lock.lock();
      if (--num_pending_ == 0) finished_.notify_one();
    }
  }

  std::mutex turn_;   // held for a whole run
  std::mutex mutex_;  // guards all below but threads_
  std::condition_variable start_;
  std::condition_variable finished_;
  Phase phase_ = Phase::kServing;
  Job job_;
  int num_pending_ = 0;
  std::uint64_t generation_ = 0;
  std::vector<std::thread> threads_;
};

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cores)
    : num_threads_(num_threads), owner_(::getpid()) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads: expected at least 1, got " + std::to_string(num_threads));
  }
  if (num_threads == 1) return;
  workers_ = std::make_unique<Workers>();
  workers_->start(num_threads - 1, cores);
}

ThreadPool::~ThreadPool() {
  // In a forked child the threads are gone and a mutex may be held for ever by one of them: the only safe
  // thing to do with the copy of the state is to leave it alone.
  if (::getpid() != owner_) static_cast<void>(workers_.release());
}

void ThreadPool::run(int num_parts, Task task, void* context) {
  if (workers_ == nullptr || num_parts <= 1 || ::getpid() != owner_) {
    for (int part = 0; part < num_parts; ++part) task(context, part);
    return;
  }
  workers_->run(num_parts, task, context);
}

}  // namespace zerooffload
