#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "io/request.hpp"
#include "io/transfer.hpp"

namespace zerooffload::io {

// What moves the pieces of requests, on threads of its own.
class Mover {
 public:
  virtual ~Mover() = default;  // closes

  // Takes a request that has pieces, and returns at once; `requests` is told of each. std::runtime_error
  // after close.
  virtual void move(std::shared_ptr<Request> request) = 0;

  // See Engine.
  virtual int register_memory(std::byte* data, std::int64_t nbytes);
  virtual void close() = 0;

  Requests requests;
};

// Moves bytes between files and memory, and makes them durable.
//
// A request's buffer and descriptor must stay valid until its ticket was waited for, or `close` returned.
// Large requests are cut into pieces. Requests, and pieces, may overtake each other; nothing orders two
// requests on the same bytes but waiting, and a flush is sure of those alone that were over when it was
// submitted. All methods may be called from any thread. In a forked child, where the threads are missing,
// they throw std::runtime_error; `close` and the destructor then do nothing.
class Engine {
 public:
  virtual ~Engine();  // closes
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request and returns at once. std::runtime_error after close.
  Ticket submit(Operation operation, const Extent& extent);

  // Waits until a request is over, and forgets it; returns when it was over. IoFailure if it failed;
  // UnknownTicket. Exactly one wait a ticket.
  Clock::time_point wait(Ticket ticket);

  // Waits for at most `timeout`; whether the request is over. The ticket stays valid. UnknownTicket.
  bool wait_for(Ticket ticket, std::chrono::milliseconds timeout);

  // Lets the kernel keep the pages of a range that will be used again and again, until `close`: then a
  // transfer need not look them up. Returns 0, or an errno if this engine, or the system, cannot; transfers
  // work all the same. The range must never be unmapped, emptied (MADV_DONTNEED) or remapped before `close`:
  // I/O would go to the old pages and report success.
  int register_memory(std::byte* data, std::int64_t nbytes);

  // Finishes what was submitted and ends the threads. Results stay to be waited for. Idempotent.
  void close();

 protected:
  // Pieces are a multiple of 4 KiB, so that those of an aligned request are aligned; std::invalid_argument.
  Engine(std::unique_ptr<Mover> mover, std::int64_t piece_nbytes);

 private:
  void require_owner() const;

  const pid_t owner_;
  const std::int64_t piece_nbytes_;
  std::unique_ptr<Mover> mover_;
};

// The longest piece: a ring's entry has 32 bits for it, and Linux moves no more than 2 GiB at once.
constexpr std::int64_t kMostPieceNbytes = std::int64_t{1} << 30;

}  // namespace zerooffload::io
