#include "io/engine.hpp"

#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

namespace zerooffload::io {
namespace {

constexpr std::int64_t kPageNbytes = 4096;

}  // namespace

int Mover::register_memory(std::byte*, std::int64_t) { return EOPNOTSUPP; }

Engine::Engine(std::unique_ptr<Mover> mover, std::int64_t piece_nbytes)
    : owner_(::getpid()), piece_nbytes_(piece_nbytes), mover_(std::move(mover)) {
  if (piece_nbytes < kPageNbytes || piece_nbytes > kMostPieceNbytes || piece_nbytes % kPageNbytes != 0) {
    throw std::invalid_argument("piece_nbytes: expected a multiple of 4096 up to 2^30, got " +
                                std::to_string(piece_nbytes));
  }
}

Engine::~Engine() {
  // In a forked child a mutex may be held for ever by a thread that does not exist: leave the copy alone.
  if (::getpid() != owner_) static_cast<void>(mover_.release());
}

void Engine::require_owner() const {
  if (::getpid() == owner_) return;
  throw std::runtime_error("this I/O engine belongs to process " + std::to_string(owner_) +
                           ", of which this one was forked: make an engine of its own here");
}

Ticket Engine::submit(Operation operation, const Extent& extent) {
  require_owner();
  if (extent.nbytes < 0) {
    throw std::invalid_argument("nbytes: expected 0 or more, got " + std::to_string(extent.nbytes));
  }
  const auto request = std::make_shared<Request>(operation, extent, piece_nbytes_);
  mover_->move(request);
  return mover_->requests.add(request);
}

Clock::time_point Engine::wait(Ticket ticket) {
  require_owner();
  return mover_->requests.wait(ticket);
}

bool Engine::wait_for(Ticket ticket, std::chrono::milliseconds timeout) {
  require_owner();
  return mover_->requests.wait_for(ticket, timeout);
}

int Engine::register_memory(std::byte* data, std::int64_t nbytes) {
  require_owner();
  return mover_->register_memory(data, nbytes);
}

void Engine::close() {
  if (::getpid() == owner_) mover_->close();
}

}  // namespace zerooffload::io
