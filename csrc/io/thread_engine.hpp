#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "io/transfer.hpp"

namespace zerooffload::io {

using Ticket = std::uint64_t;

// Moves bytes between files and memory with pread and pwrite on threads of its own.
//
// A request's buffer and descriptor must stay valid until its ticket was waited for, or `close` returned.
// A request is one transfer on one thread. Cutting large ones into pieces for several threads was never
// faster: with requests of 16 and 64 MiB, one to four under way, on 2 to 8 threads, with O_DIRECT and huge
// pages, pieces of 4 MiB came to 0.85 to 1.0 of the whole, pieces of 1 MiB to 0.8 to 1.0.
//
// Requests may overtake each other; nothing orders two requests on the same bytes but waiting. All methods
// may be called from any thread. In a forked child, where the threads are missing, they throw
// std::runtime_error.
class ThreadEngine {
 public:
  explicit ThreadEngine(int num_threads, const SystemCalls& calls = kSystemCalls);
  ~ThreadEngine();  // closes
  ThreadEngine(const ThreadEngine&) = delete;
  ThreadEngine& operator=(const ThreadEngine&) = delete;

  // Queues a request and returns at once. std::runtime_error after close.
  Ticket submit(Operation operation, const Extent& extent);

  // Waits until a request is over, and forgets it. IoFailure if it failed; UnknownTicket. Exactly one wait a
  // ticket.
  void wait(Ticket ticket);

  // Waits for at most `timeout`; whether the request is over. The ticket stays valid. UnknownTicket.
  bool wait_for(Ticket ticket, std::chrono::milliseconds timeout);

  // Finishes what was submitted and ends the threads. Results stay to be waited for. Idempotent.
  void close();

 private:
  class State;
  void require_owner() const;

  pid_t owner_;
  std::unique_ptr<State> state_;
};

}  // namespace zerooffload::io
