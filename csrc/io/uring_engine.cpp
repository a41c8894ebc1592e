#include "io/uring_engine.hpp"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/worker_thread.hpp"

namespace zerooffload::io {
namespace {

constexpr int kMostEntries = 4096;
constexpr std::chrono::milliseconds kPause{1};

// A piece that has a place in the ring.
struct Slot {
  std::shared_ptr<Request> request;
  std::int64_t index = 0;
  Extent extent{};
  std::int64_t transferred = 0;
  Ring::Issue issue = Ring::Issue::kAtOnce;
};

// Ranges whose pages the kernel keeps.
class RegisteredRanges {
 public:
  int size() const { return static_cast<int>(ranges_.size()); }
  void add(std::byte* start, std::int64_t nbytes, int buffer) { ranges_[start] = {start + nbytes, buffer}; }

  // The one that holds all of an extent, or kUnregistered.
  int find(const Extent& extent) const {
    auto after = ranges_.upper_bound(extent.data);
    if (after == ranges_.begin()) return Ring::kUnregistered;
    const Range& range = std::prev(after)->second;
    return extent.data + extent.nbytes <= range.end ? range.buffer : Ring::kUnregistered;
  }

 private:
  struct Range {
    std::byte* end;
    int buffer;
  };
  std::map<std::byte*, Range> ranges_;
};

class RingMover final : public Mover {
 public:
  ~RingMover() override { close(); }

  // Not in the constructor: see ThreadMover.
  void start(int num_entries, const OpenRing& open_ring) {
    slots_.resize(static_cast<std::size_t>(num_entries));
    for (int slot = num_entries; slot-- > 0;) free_.push_back(static_cast<std::uint32_t>(slot));
    thread_ = start_worker("zo-uring", [this, open_ring] { run(open_ring); });
    std::unique_lock<std::mutex> lock(mutex_);
    answered_.wait(lock, [this] { return phase_ != Phase::kOpening; });
    if (open_failure_) std::rethrow_exception(open_failure_);
  }

  void move(std::shared_ptr<Request> request) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::kOpen) throw std::runtime_error("submit: this I/O engine is closed");
    if (request->num_pieces() == 0) return;
    const bool was_empty = arrived_.empty();
    arrived_.push_back(std::move(request));
    if (was_empty) ring_->wake();
  }

  int register_memory(std::byte* data, std::int64_t nbytes) override {
    Registration registration{data, nbytes};
    std::unique_lock<std::mutex> lock(mutex_);
    if (phase_ != Phase::kOpen) throw std::runtime_error("register: this I/O engine is closed");
    registrations_.push_back(&registration);
    ring_->wake();
    answered_.wait(lock, [&registration] { return registration.is_answered; });
    return registration.error;
  }

  void close() override {
    const std::lock_guard<std::mutex> turn(closing_);  // a second caller returns when the first is done
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (phase_ == Phase::kOpen) ring_->wake();
      phase_ = Phase::kClosed;
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  enum class Phase { kOpening, kOpen, kClosed };
  struct Registration {
    std::byte* data;
    std::int64_t nbytes;
    int error = 0;
    bool is_answered = false;
  };
  struct Waiting {
    std::shared_ptr<Request> request;
    std::int64_t next_index;
  };

  // --- the thread, which alone uses the ring

  void run(const OpenRing& open_ring) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      try {
        ring_ = open_ring(static_cast<std::uint32_t>(slots_.size()));
        phase_ = Phase::kOpen;
      } catch (...) {
        open_failure_ = std::current_exception();
        phase_ = Phase::kClosed;
      }
      answered_.notify_all();
    }
    while (take_what_arrived()) {
      fill();
      if (broken_ == 0) {
        enter();
      } else {
        std::this_thread::sleep_for(kPause);
      }
      Ring::Completion completion{};
      while (ring_->next(&completion)) complete(completion);
    }
    ring_.reset();
  }

  // Whether there is, or may come, something to do.
  bool take_what_arrived() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (std::shared_ptr<Request>& request : arrived_) waiting_.push_back({std::move(request), 0});
    arrived_.clear();
    while (!registrations_.empty()) {
      Registration* const registration = registrations_.back();
      registrations_.pop_back();
      lock.unlock();
      const int error = register_range(registration->data, registration->nbytes);
      lock.lock();
      registration->error = error;
      registration->is_answered = true;
      answered_.notify_all();
    }
    return phase_ == Phase::kOpen || !waiting_.empty() || free_.size() < slots_.size() || !arrived_.empty();
  }

  int register_range(std::byte* data, std::int64_t nbytes) {
    for (std::int64_t start = 0; start < nbytes; start += Ring::kMostBufferNbytes) {
      const std::int64_t length = std::min(nbytes - start, Ring::kMostBufferNbytes);
      if (ranges_.find(Extent{-1, 0, data + start, length}) != Ring::kUnregistered) continue;
      if (ranges_.size() == Ring::kMostBuffers) return ENOSPC;
      const int error = ring_->register_buffer(ranges_.size(), data + start, length);
      if (error != 0) return error;
      ranges_.add(data + start, length, ranges_.size());
    }
    return 0;
  }

  // Gives waiting pieces a place in the ring, as far as there are places.
  void fill() {
    while (!waiting_.empty() && !free_.empty()) {
      Waiting& first = waiting_.front();
      const std::uint32_t id = free_.back();
      free_.pop_back();
      slots_[id] = Slot{first.request, first.next_index, first.request->piece(first.next_index)};
      if (++first.next_index == first.request->num_pieces()) waiting_.pop_front();
      prepare(id);
    }
  }

  void prepare(std::uint32_t id) {
    const Slot& slot = slots_[id];
    if (broken_ != 0) return finish(id, broken_);
    const Extent rest{slot.extent.fd, slot.extent.offset + slot.transferred,
                      slot.extent.data + slot.transferred, slot.extent.nbytes - slot.transferred};
    ring_->prepare({id, slot.request->operation(), rest, ranges_.find(rest), slot.issue});
    prepared_.push_back(id);
  }

  void enter() {
    const Ring::Entered entered = ring_->submit_and_wait();
    for (std::uint32_t i = 0; i < entered.num_accepted; ++i) prepared_.pop_front();
    switch (entered.error) {
      case 0:
      case EINTR:
        return;
      case EAGAIN:  // the kernel is short of memory, or
      case EBUSY:   // has completions that found no place: both pass
        std::this_thread::sleep_for(kPause);
        return;
      default:
        break;
    }
    // The ring takes nothing any more. What it has is still waited for: the kernel may write to its buffers.
    broken_ = entered.error;
    for (const std::uint32_t id : prepared_) finish(id, broken_);
    prepared_.clear();
  }

  void complete(const Ring::Completion& completion) {
    Slot& slot = slots_[completion.id];
    const Operation operation = slot.request->operation();
    const std::int64_t result = completion.result;
    if (result == -EINTR) return prepare(completion.id);
    if (result == -EAGAIN && slot.issue == Ring::Issue::kAtOnce) {
      slot.issue = Ring::Issue::kOnWorker;
      return prepare(completion.id);
    }
    if (result < 0) return finish(completion.id, static_cast<int>(-result));
    if (operation == Operation::kFlush) return finish(completion.id, 0);
    // A write of nothing is no end of file, but asking again might never end.
    if (result == 0) return finish(completion.id, operation == Operation::kRead ? kEndOfFile : EIO);
    slot.transferred += result;
    if (slot.transferred == slot.extent.nbytes) return finish(completion.id, 0);
    prepare(completion.id);
  }

  void finish(std::uint32_t id, int error) {
    Slot& slot = slots_[id];
    requests.piece_over(*slot.request, slot.index, Outcome{slot.transferred, error});
    slot = {};
    free_.push_back(id);
  }

  std::thread thread_;
  std::unique_ptr<Ring> ring_;  // others may wake it, under the mutex and while this is open
  std::vector<Slot> slots_;     // by the ids of the ring's entries
  std::vector<std::uint32_t> free_;
  std::deque<Waiting> waiting_;         // for a place
  std::deque<std::uint32_t> prepared_;  // not yet accepted by the kernel
  RegisteredRanges ranges_;
  int broken_ = 0;  // the errno that made the ring unusable

  // --- what others share with it, under the mutex

  std::mutex closing_;
  std::mutex mutex_;
  std::condition_variable answered_;
  Phase phase_ = Phase::kOpening;
  std::exception_ptr open_failure_;
  std::vector<std::shared_ptr<Request>> arrived_;
  std::vector<Registration*> registrations_;
};

std::unique_ptr<Mover> start_ring(int num_entries, const OpenRing& open_ring) {
  if (num_entries < 1 || num_entries > kMostEntries) {
    throw std::invalid_argument("num_entries: expected 1 to " + std::to_string(kMostEntries) + ", got " +
                                std::to_string(num_entries));
  }
  auto mover = std::make_unique<RingMover>();
  mover->start(num_entries, open_ring);
  return mover;
}

}  // namespace

UringEngine::UringEngine(int num_entries, std::int64_t piece_nbytes, const OpenRing& open_ring)
    : Engine(start_ring(num_entries, open_ring), piece_nbytes) {}

}  // namespace zerooffload::io
