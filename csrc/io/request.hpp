#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "io/transfer.hpp"

namespace zerooffload::io {

using Ticket = std::uint64_t;

// On Linux that of Python's time.perf_counter.
using Clock = std::chrono::steady_clock;

// What was submitted, cut into pieces of one length (the last is what is left), so that a device has several
// of them to work on. A flush is one piece; an extent without bytes has none.
class Request {
 public:
  Request(Operation operation, const Extent& extent, std::int64_t piece_nbytes);

  Operation operation() const { return operation_; }
  std::int64_t num_pieces() const { return num_pieces_; }
  Extent piece(std::int64_t index) const;

 private:
  friend class Requests;  // whose lock guards all that changes

  const Operation operation_;
  const Extent extent_;
  const std::int64_t piece_nbytes_;
  const std::int64_t num_pieces_;
  std::int64_t num_unfinished_;
  Clock::time_point ended_at_{};  // of the last piece, or of a request without any
  std::int64_t failed_piece_;     // the first that failed; num_pieces_ if none did
  Outcome outcome_{};             // of that piece, counted from the start of the request
};

// Tickets, and how far their requests are.
class Requests {
 public:
  // A request under way, or over already.
  Ticket add(std::shared_ptr<Request> request);

  // Each piece once. The buffer is the caller's again when all are over, also after a failure.
  void piece_over(Request& request, std::int64_t index, const Outcome& outcome);

  // Waits until a request is over, and forgets it; returns when it was over, however late that is asked.
  // IoFailure if it failed; UnknownTicket.
  Clock::time_point wait(Ticket ticket);

  // Whether it is over, after at most `timeout`. UnknownTicket.
  bool wait_for(Ticket ticket, std::chrono::milliseconds timeout);

 private:
  using Book = std::unordered_map<Ticket, std::shared_ptr<Request>>;
  Book::iterator find(Ticket ticket);

  std::mutex mutex_;
  std::condition_variable finished_;
  Ticket next_ticket_ = 1;
  Book book_;
};

}  // namespace zerooffload::io
