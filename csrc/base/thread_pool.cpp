#include "base/thread_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
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
      is_stopping_ = true;
    }
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Not in the constructor: should the system refuse the n-th thread, the destructor still joins those before
  // it.
  void start(int num_workers, const std::vector<int>& cores) {
    threads_.reserve(static_cast<std::size_t>(num_workers));
    for (int i = 0; i < num_workers; ++i) {
      threads_.push_back(start_worker("zo-pool", [this] { serve(); }));
      keep_on(threads_.back(), cores);
    }
  }

  void run(int num_parts, Task task, void* context) {
    Job job(num_parts, task, context);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
    }
    start_.notify_all();
    while (job.do_next()) {
    }
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    left_.wait(lock, [&job] { return job.num_helpers == 0; });
  }

 private:
  // Lives on its caller's stack, until no worker is at it any more.
  struct Job {
    Job(int number, Task what, void* with) : num_parts(number), task(what), context(with) {}

    bool is_begun() const { return next.load(std::memory_order_relaxed) >= num_parts; }

    // False if no part is left to begin.
    bool do_next() {
      const int part = next.fetch_add(1, std::memory_order_relaxed);
      if (part >= num_parts) return false;
      task(context, part);
      return true;
    }

    const int num_parts;
    const Task task;
    void* const context;
    std::atomic<int> next{0};
    int num_helpers = 0;  // guarded by mutex_
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      start_.wait(lock, [&] { return is_stopping_ || (job = newest_job()) != nullptr; });
      if (is_stopping_) return;
      ++job->num_helpers;
      lock.unlock();
      job->do_next();
      lock.lock();
      if (--job->num_helpers == 0) left_.notify_all();
    }
  }

  // Of those with parts to begin; or null.
  Job* newest_job() const {
    for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) {
      if (!(*job)->is_begun()) return *job;
    }
    return nullptr;
  }

  std::mutex mutex_;  // guards all below but threads_
  std::condition_variable start_;
  std::condition_variable left_;
  bool is_stopping_ = false;
  std::vector<Job*> jobs_;
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
