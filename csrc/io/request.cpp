#include "io/request.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "io/failure.hpp"

namespace zerooffload::io {

Request::Request(Operation operation, const Extent& extent, std::int64_t piece_nbytes)
    : operation_(operation),
      extent_(extent),
      piece_nbytes_(piece_nbytes),
      num_pieces_(operation == Operation::kFlush ? 1 : (extent.nbytes + piece_nbytes - 1) / piece_nbytes),
      num_unfinished_(num_pieces_),
      failed_piece_(num_pieces_) {
  if (num_pieces_ == 0) ended_at_ = Clock::now();
}

Extent Request::piece(std::int64_t index) const {
  const std::int64_t start = index * piece_nbytes_;
  return Extent{extent_.fd, extent_.offset + start, extent_.data + start,
                std::min(piece_nbytes_, extent_.nbytes - start)};
}

Ticket Requests::add(std::shared_ptr<Request> request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  book_.emplace(next_ticket_, std::move(request));
  return next_ticket_++;
}

void Requests::piece_over(Request& request, std::int64_t index, const Outcome& outcome) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (outcome.error != 0 && index < request.failed_piece_) {
    request.failed_piece_ = index;
    // All pieces before the first that failed have moved whole.
    request.outcome_ = {index * request.piece_nbytes_ + outcome.transferred, outcome.error};
  }
  if (--request.num_unfinished_ == 0) {
    request.ended_at_ = Clock::now();
    finished_.notify_all();
  }
}

Clock::time_point Requests::wait(Ticket ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  // Looked up again at each wake-up: another thread may have taken the ticket meanwhile.
  finished_.wait(lock, [this, ticket] { return find(ticket)->second->num_unfinished_ == 0; });
  const auto found = find(ticket);
  const std::shared_ptr<Request> request = found->second;
  book_.erase(found);
  lock.unlock();
  if (request->outcome_.error != 0) throw IoFailure(request->operation_, request->extent_, request->outcome_);
  return request->ended_at_;
}

bool Requests::wait_for(Ticket ticket, std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return finished_.wait_for(lock, timeout,
                            [this, ticket] { return find(ticket)->second->num_unfinished_ == 0; });
}

Requests::Book::iterator Requests::find(Ticket ticket) {
  const auto found = book_.find(ticket);
  if (found == book_.end()) {
    throw UnknownTicket("ticket " + std::to_string(ticket) +
                        " was never given out or was waited for already");
  }
  return found;
}

}  // namespace zerooffload::io
