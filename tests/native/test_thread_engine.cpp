// The thread engine over scripted system calls.

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "check.hpp"
#include "io/failure.hpp"
#include "io/thread_engine.hpp"
#include "temporary_file.hpp"

using namespace zerooffload::io;

namespace {

// A system call that moves at most 1000 bytes, and is interrupted now and then.
std::atomic<int> num_calls{0};
ssize_t stingy_pread(int fd, void* data, std::size_t nbytes, off_t offset) {
  if (++num_calls % 3 == 0) {
    errno = EINTR;
    return -1;
  }
  return ::pread(fd, data, nbytes < 1000 ? nbytes : 1000, offset);
}
ssize_t stingy_pwrite(int fd, const void* data, std::size_t nbytes, off_t offset) {
  if (++num_calls % 3 == 0) {
    errno = EINTR;
    return -1;
  }
  return ::pwrite(fd, data, nbytes < 1000 ? nbytes : 1000, offset);
}

// Fails from this byte of the file on.
constexpr std::int64_t kWall = 12388;
ssize_t failing_pread(int, void*, std::size_t nbytes, off_t offset) {
  if (offset >= kWall) {
    errno = ENXIO;
    return -1;
  }
  return static_cast<ssize_t>(nbytes) < kWall - offset ? static_cast<ssize_t>(nbytes) : kWall - offset;
}

// Waits for a door to be opened.
std::mutex door;
ssize_t blocked_pread(int, void*, std::size_t nbytes, off_t) {
  const std::lock_guard<std::mutex> lock(door);
  return static_cast<ssize_t>(nbytes);
}

}  // namespace

TEST(thread_engine_resumes_short_and_interrupted_transfers) {
  for (const std::int64_t piece_nbytes : {std::int64_t{4096}, kMostPieceNbytes}) {
    const TemporaryFile file;
    ThreadEngine engine(4, piece_nbytes, SystemCalls{stingy_pread, stingy_pwrite});
    std::vector<std::byte> source = random_bytes(50000, 2), target(source.size());
    engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source)));
    engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 0, target)));
    CHECK(source == target);
  }
}

TEST(thread_engine_reports_how_far_a_failed_request_came) {
  for (const std::int64_t piece_nbytes : {std::int64_t{4096}, kMostPieceNbytes}) {
    ThreadEngine engine(4, piece_nbytes, SystemCalls{failing_pread, ::pwrite});
    std::vector<std::byte> target(40960);
    try {
      engine.wait(engine.submit(Operation::kRead, extent_of(5, 0, target)));
      CHECK(!"a failure was expected");
    } catch (const IoFailure& failure) {
      CHECK_EQUAL(failure.error, ENXIO);
      CHECK_EQUAL(failure.transferred, kWall);
    }
  }
}

TEST(thread_engine_wait_for_times_out_and_keeps_the_ticket) {
  ThreadEngine engine(1, kMostPieceNbytes, SystemCalls{blocked_pread, ::pwrite});
  std::vector<std::byte> target(10);
  Ticket ticket = 0;
  {
    const std::lock_guard<std::mutex> closed(door);
    ticket = engine.submit(Operation::kRead, extent_of(0, 0, target));
    CHECK(!engine.wait_for(ticket, std::chrono::milliseconds{1}));
    CHECK(!engine.wait_for(ticket, std::chrono::milliseconds{0}));
  }
  CHECK(engine.wait_for(ticket, std::chrono::seconds{60}));
  engine.wait(ticket);
}
