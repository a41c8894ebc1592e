#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "io/failure.hpp"
#include "io/thread_engine.hpp"

using namespace zerooffload::io;

namespace {

class TemporaryFile {
 public:
  TemporaryFile() : file_(std::tmpfile()) { CHECK(file_ != nullptr); }
  ~TemporaryFile() { std::fclose(file_); }
  int fd() const { return ::fileno(file_); }

 private:
  std::FILE* file_;
};

std::vector<std::byte> random_bytes(std::int64_t nbytes, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::byte> data(static_cast<std::size_t>(nbytes));
  for (std::byte& value : data) value = static_cast<std::byte>(generator());
  return data;
}

Extent extent_of(int fd, std::int64_t offset, std::vector<std::byte>& data) {
  return Extent{fd, offset, data.data(), static_cast<std::int64_t>(data.size())};
}

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

TEST(engine_refuses_zero_threads) { CHECK_THROWS(std::invalid_argument, ThreadEngine(0)); }

TEST(engine_moves_bytes_both_ways) {
  for (const std::int64_t nbytes : {0, 1, 4095, 4096, 4097, 5 * 4096 + 17, 100000}) {
    const TemporaryFile file;
    ThreadEngine engine(3);
    std::vector<std::byte> source = random_bytes(nbytes, 1), target(source.size());
    engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), 77, source)));
    engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 77, target)));
    CHECK(source == target);
  }
}

TEST(engine_resumes_short_and_interrupted_transfers) {
  const TemporaryFile file;
  ThreadEngine engine(4, SystemCalls{stingy_pread, stingy_pwrite});
  std::vector<std::byte> source = random_bytes(50000, 2), target(source.size());
  engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source)));
  engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 0, target)));
  CHECK(source == target);
}

TEST(engine_holds_many_tickets_waited_for_in_any_order) {
  const TemporaryFile file;
  ThreadEngine engine(4);
  std::vector<std::vector<std::byte>> sources, targets;
  std::vector<Ticket> tickets;
  for (int i = 0; i < 300; ++i) {
    sources.push_back(random_bytes(3000, static_cast<unsigned>(i)));
    targets.emplace_back(3000);
  }
  for (int i = 0; i < 300; ++i) {
    tickets.push_back(engine.submit(Operation::kWrite,
                                    extent_of(file.fd(), i * 3000, sources[static_cast<std::size_t>(i)])));
  }
  for (std::size_t i = tickets.size(); i-- > 0;) engine.wait(tickets[i]);
  tickets.clear();
  for (int i = 0; i < 300; ++i) {
    tickets.push_back(engine.submit(Operation::kRead,
                                    extent_of(file.fd(), i * 3000, targets[static_cast<std::size_t>(i)])));
  }
  for (const Ticket ticket : tickets) engine.wait(ticket);
  CHECK(sources == targets);
}

TEST(engine_reports_how_far_a_failed_request_came) {
  ThreadEngine engine(4, SystemCalls{failing_pread, ::pwrite});
  std::vector<std::byte> target(40960);
  const Ticket ticket = engine.submit(Operation::kRead, extent_of(5, 0, target));
  try {
    engine.wait(ticket);
  } catch (const IoFailure& failure) {
    CHECK_EQUAL(failure.error, ENXIO);
    CHECK_EQUAL(failure.fd, 5);
    CHECK_EQUAL(failure.offset, 0);
    CHECK_EQUAL(failure.length, 40960);
    CHECK_EQUAL(failure.transferred, kWall);
    CHECK(failure.operation == Operation::kRead);
    return;
  }
  CHECK(!"a failure was expected");
}

TEST(engine_flushes) {
  const TemporaryFile file;
  ThreadEngine engine(2);
  engine.wait(engine.submit(Operation::kFlush, Extent{file.fd(), 0, nullptr, 0}));
  const Ticket bad = engine.submit(Operation::kFlush, Extent{-1, 0, nullptr, 0});
  const std::string message = CHECK_THROWS(IoFailure, engine.wait(bad));
  CHECK(message.find("flush of file descriptor -1 failed") != std::string::npos);
}

TEST(engine_tells_the_end_of_a_file) {
  const TemporaryFile file;
  CHECK_EQUAL(::ftruncate(file.fd(), 5000), 0);
  ThreadEngine engine(2);
  std::vector<std::byte> target(6000);
  const std::string message =
      CHECK_THROWS(IoFailure, engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 0, target))));
  CHECK(message.find("after 5000 bytes: unexpected end of file") != std::string::npos);
}

TEST(engine_knows_a_ticket_once) {
  ThreadEngine engine(1);
  CHECK_THROWS(UnknownTicket, engine.wait(1));
  const Ticket ticket = engine.submit(Operation::kRead, Extent{0, 0, nullptr, 0});
  engine.wait(ticket);
  CHECK_THROWS(UnknownTicket, engine.wait(ticket));
  CHECK_THROWS(UnknownTicket, engine.wait_for(ticket, std::chrono::milliseconds{0}));
}

TEST(engine_wait_for_times_out_and_keeps_the_ticket) {
  ThreadEngine engine(1, SystemCalls{blocked_pread, ::pwrite});
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

TEST(engine_close_finishes_what_was_submitted) {
  const TemporaryFile file;
  ThreadEngine engine(2);
  std::vector<std::byte> source = random_bytes(200000, 3);
  const Ticket written = engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source));
  engine.close();
  engine.close();
  CHECK(engine.wait_for(written, std::chrono::milliseconds{0}));
  engine.wait(written);
  CHECK_EQUAL(::lseek(file.fd(), 0, SEEK_END), 200000);
  CHECK_THROWS(std::runtime_error, engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source)));
}

TEST(engine_may_be_closed_by_several_threads_while_others_wait) {
  const TemporaryFile file;
  ThreadEngine engine(2);
  std::vector<std::byte> source = random_bytes(500000, 4);
  const Ticket ticket = engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source));
  std::thread waiter([&] { engine.wait(ticket); });
  std::thread closer([&] { engine.close(); });
  engine.close();
  closer.join();
  waiter.join();
}

TEST(engine_destructor_closes) {
  const TemporaryFile file;
  std::vector<std::byte> source = random_bytes(100000, 5);
  {
    ThreadEngine engine(2);
    engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source));
  }
  CHECK_EQUAL(::lseek(file.fd(), 0, SEEK_END), 100000);
}

TEST(engine_refuses_to_work_in_a_forked_child) {
  auto engine = std::make_unique<ThreadEngine>(2);
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      engine->submit(Operation::kRead, Extent{0, 0, nullptr, 0});
    } catch (const std::runtime_error&) {
      status = 0;
    }
    engine->close();
    engine.reset();
    ::_exit(status);
  }
  int status = -1;
  CHECK_EQUAL(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
}
