#include "io/thread_engine.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/worker_thread.hpp"

namespace zerooffload::io {
namespace {

// All members but the threads are guarded by one mutex, which nobody holds during a transfer.
class ThreadMover final : public Mover {
 public:
  explicit ThreadMover(const SystemCalls& calls) : calls_(calls) {}
  ~ThreadMover() override { close(); }

  // Not in the constructor: should the system refuse the n-th thread, the destructor still joins those before
  // it.
  void start(int num_threads) {
    threads_.reserve(static_cast<std::size_t>(num_threads));
    for (int i = 0; i < num_threads; ++i) threads_.push_back(start_worker("zo-io", [this] { serve(); }));
  }

  void move(std::shared_ptr<Request> request) override {
    const std::int64_t num_pieces = request->num_pieces();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (phase_ != Phase::kOpen) throw std::runtime_error("submit: this I/O engine is closed");
      for (std::int64_t index = 0; index < num_pieces; ++index) queue_.push_back({request, index});
    }
    if (num_pieces == 1) {
      queued_.notify_one();
    } else {
      queued_.notify_all();
    }
  }

  void close() override {
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
  struct Piece {
    std::shared_ptr<Request> request;
    std::int64_t index;
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      queued_.wait(lock, [this] { return !queue_.empty() || phase_ == Phase::kClosed; });
      if (queue_.empty()) return;
      const Piece piece = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      const Outcome outcome = transfer(piece.request->operation(), piece.request->piece(piece.index), calls_);
      requests.piece_over(*piece.request, piece.index, outcome);
      lock.lock();
    }
  }

  const SystemCalls calls_;
  std::mutex closing_;
  std::mutex mutex_;
  std::condition_variable queued_;
  Phase phase_ = Phase::kOpen;
  std::deque<Piece> queue_;
  std::vector<std::thread> threads_;
};

std::unique_ptr<Mover> start_threads(int num_threads, const SystemCalls& calls) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads: expected at least 1, got " + std::to_string(num_threads));
  }
  auto mover = std::make_unique<ThreadMover>(calls);
  mover->start(num_threads);
  return mover;
}

}  // namespace

ThreadEngine::ThreadEngine(int num_threads, std::int64_t piece_nbytes, const SystemCalls& calls)
    : Engine(start_threads(num_threads, calls), piece_nbytes) {}

}  // namespace zerooffload::io
