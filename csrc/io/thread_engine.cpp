#include "io/thread_engine.hpp"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/worker_thread.hpp"
#include "io/failure.hpp"

namespace zerooffload::io {
namespace {

enum class Stage { kUnderWay, kOver };

struct Request {
  Operation operation;
  Extent extent;
  Stage stage = Stage::kUnderWay;
  Outcome outcome{};
};

}  // namespace

// All members but the threads are guarded by one mutex, which nobody holds during a transfer.
class ThreadEngine::State {
 public:
  explicit State(const SystemCalls& calls) : calls_(calls) {}
  ~State() { close(); }

  // Not in the constructor: should the system refuse the n-th thread, the destructor still joins those before
  // it.
  void start(int num_threads) {
    threads_.reserve(static_cast<std::size_t>(num_threads));
    for (int i = 0; i < num_threads; ++i) threads_.push_back(start_worker("zo-io", [this] { serve(); }));
  }

  Ticket submit(Operation operation, const Extent& extent) {
    const auto request = std::make_shared<Request>(Request{operation, extent});
    Ticket ticket;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (phase_ != Phase::kOpen) throw std::runtime_error("submit: this I/O engine is closed");
      ticket = next_ticket_++;
      requests_.emplace(ticket, request);
      queue_.push_back(request);
    }
    queued_.notify_one();
    return ticket;
  }

  void wait(Ticket ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    // Looked up again at each wake-up: another thread may have taken the ticket meanwhile.
    finished_.wait(lock, [this, ticket] { return find(ticket)->second->stage == Stage::kOver; });
    const auto found = find(ticket);
    const std::shared_ptr<Request> request = found->second;
    requests_.erase(found);
    lock.unlock();
    if (request->outcome.error != 0) throw IoFailure(request->operation, request->extent, request->outcome);
  }

  bool wait_for(Ticket ticket, std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, timeout,
                              [this, ticket] { return find(ticket)->second->stage == Stage::kOver; });
  }

  void close() {
    const std::lock_guard<std::mutex> turn(closing_);  // a second caller returns when the first is done
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      phase_ = Phase::kClosed;
    }
    queued_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  enum class Phase { kOpen, kClosed };
  using Requests = std::unordered_map<Ticket, std::shared_ptr<Request>>;

  Requests::iterator find(Ticket ticket) {
    const auto found = requests_.find(ticket);
    if (found == requests_.end()) {
      throw UnknownTicket("ticket " + std::to_string(ticket) +
                          " was never given out or was waited for already");
    }
    return found;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      queued_.wait(lock, [this] { return !queue_.empty() || phase_ == Phase::kClosed; });
      if (queue_.empty()) return;
      const std::shared_ptr<Request> request = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      const Outcome outcome = transfer(request->operation, request->extent, calls_);
      lock.lock();
      request->outcome = outcome;
      request->stage = Stage::kOver;
      finished_.notify_all();
    }
  }

  const SystemCalls calls_;
  std::mutex closing_;
  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable finished_;
  Phase phase_ = Phase::kOpen;
  Ticket next_ticket_ = 1;
  std::deque<std::shared_ptr<Request>> queue_;
  Requests requests_;  // submitted and not yet waited for
  std::vector<std::thread> threads_;
};

ThreadEngine::ThreadEngine(int num_threads, const SystemCalls& calls) : owner_(::getpid()) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads: expected at least 1, got " + std::to_string(num_threads));
  }
  state_ = std::make_unique<State>(calls);
  state_->start(num_threads);
}

ThreadEngine::~ThreadEngine() {
  // In a forked child a mutex may be held for ever by a thread that does not exist: leave the copy alone.
  if (::getpid() != owner_) static_cast<void>(state_.release());
}

void ThreadEngine::require_owner() const {
  if (::getpid() == owner_) return;
  throw std::runtime_error("this I/O engine belongs to process " + std::to_string(owner_) +
                           ", of which this one was forked: make an engine of its own here");
}

Ticket ThreadEngine::submit(Operation operation, const Extent& extent) {
  require_owner();
  if (extent.nbytes < 0) {
    throw std::invalid_argument("nbytes: expected 0 or more, got " + std::to_string(extent.nbytes));
  }
  return state_->submit(operation, extent);
}

void ThreadEngine::wait(Ticket ticket) {
  require_owner();
  state_->wait(ticket);
}

bool ThreadEngine::wait_for(Ticket ticket, std::chrono::milliseconds timeout) {
  require_owner();
  return state_->wait_for(ticket, timeout);
}

void ThreadEngine::close() {
  if (::getpid() == owner_) state_->close();
}

}  // namespace zerooffload::io
