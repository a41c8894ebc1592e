#include "rings.hpp"

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

using namespace zerooffload::io;

void SimulatedRing::prepare(const Entry& entry) { prepared_.push_back(entry); }

Ring::Entered SimulatedRing::submit_and_wait() {
  // Some are left for the next time, as the kernel may do.
  std::uint32_t num_accepted = 0;
  while (!prepared_.empty() && num_accepted < 5) {
    perform(prepared_.front());
    prepared_.pop_front();
    ++num_accepted;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (completions_.empty()) woken_.wait(lock, [this] { return is_woken_; });
  is_woken_ = false;
  return {num_accepted, 0};
}

void SimulatedRing::perform(const Entry& entry) {
  if (entry.buffer != kUnregistered) {
    const Extent& buffer = buffers_.at(static_cast<std::size_t>(entry.buffer));
    if (entry.extent.data < buffer.data ||
        entry.extent.data + entry.extent.nbytes > buffer.data + buffer.nbytes) {
      completions_.push_back({entry.id, -EFAULT});
      return;
    }
  }
  const Outcome outcome = transfer(entry.operation, entry.extent, kSystemCalls);
  const bool failed = outcome.error > 0 && outcome.transferred == 0;
  completions_.push_back({entry.id, failed ? -outcome.error : outcome.transferred});
}

bool SimulatedRing::next(Completion* completion) {
  if (completions_.empty()) return false;
  std::swap(completions_[random_() % completions_.size()], completions_.back());
  *completion = completions_.back();
  completions_.pop_back();
  return true;
}

void SimulatedRing::wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_woken_ = true;
  woken_.notify_one();
}

int SimulatedRing::register_buffer(int buffer, std::byte* data, std::int64_t nbytes) {
  if (static_cast<std::size_t>(buffer) != buffers_.size()) return EINVAL;
  buffers_.push_back({-1, 0, data, nbytes});
  return 0;
}

namespace {

class ScriptedRing final : public Ring {
 public:
  ScriptedRing(std::unique_ptr<Ring> inner, const Script& script)
      : inner_(std::move(inner)), script_(script) {}

  void prepare(const Entry& entry) override {
    Entry passed = entry;
    const std::int64_t nbytes = script_.operation(entry);
    if (nbytes < 0) {
      held_back_.push_back({entry.id, nbytes});
    } else {
      passed.extent.nbytes = nbytes;
      inner_->prepare(passed);
    }
    is_held_back_.push_back(nbytes < 0);
  }

  Entered submit_and_wait() override {
    const int error = script_.enter();
    if (error != 0) return {0, error};
    if (!held_back_.empty()) inner_->wake();
    Entered entered = inner_->submit_and_wait();
    // Of those between and before the accepted ones, all are.
    std::uint32_t num_passed = entered.num_accepted;
    entered.num_accepted = 0;
    while (!is_held_back_.empty() && (is_held_back_.front() || num_passed > 0)) {
      if (!is_held_back_.front()) --num_passed;
      is_held_back_.pop_front();
      ++entered.num_accepted;
    }
    return entered;
  }

  bool next(Completion* completion) override {
    if (held_back_.empty()) return inner_->next(completion);
    *completion = held_back_.back();
    held_back_.pop_back();
    return true;
  }

  void wake() override { inner_->wake(); }
  int register_buffer(int buffer, std::byte* data, std::int64_t nbytes) override {
    return inner_->register_buffer(buffer, data, nbytes);
  }

 private:
  std::unique_ptr<Ring> inner_;
  const Script script_;
  std::vector<Completion> held_back_;
  std::deque<bool> is_held_back_;  // of those not yet accepted
};

}  // namespace

OpenRing simulated() {
  return [](std::uint32_t) { return std::make_unique<SimulatedRing>(); };
}

OpenRing scripted(const OpenRing& inner, const Script& script) {
  return [=](std::uint32_t num_entries) -> std::unique_ptr<Ring> {
    return std::make_unique<ScriptedRing>(inner(num_entries), script);
  };
}

bool has_kernel_ring() {
  static const bool has = [] {
    try {
      open_kernel_ring(1);
      return true;
    } catch (const std::system_error& refused) {
      std::printf("skipped tests of io_uring: %s\n", refused.what());
      return false;
    }
  }();
  return has;
}
