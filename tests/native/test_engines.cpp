// What every engine does alike, whatever its pieces, with and without a kernel that has io_uring.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "io/failure.hpp"
#include "io/thread_engine.hpp"
#include "io/uring_engine.hpp"
#include "rings.hpp"
#include "temporary_file.hpp"

using namespace zerooffload::io;

namespace {

using Body = std::function<void(Engine&)>;

void for_each_engine(const Body& body) {
  for (const std::int64_t piece_nbytes : {std::int64_t{4096}, std::int64_t{16384}, kMostPieceNbytes}) {
    body(*std::make_unique<ThreadEngine>(3, piece_nbytes));
    body(*std::make_unique<UringEngine>(8, piece_nbytes, simulated()));
    if (has_kernel_ring()) body(*std::make_unique<UringEngine>(8, piece_nbytes));
  }
}

}  // namespace

TEST(engines_refuse_settings_that_cannot_be) {
  CHECK_THROWS(std::invalid_argument, ThreadEngine(0));
  CHECK_THROWS(std::invalid_argument, UringEngine(0, 4096, simulated()));
  CHECK_THROWS(std::invalid_argument, UringEngine(5000, 4096, simulated()));
  for (const std::int64_t piece_nbytes : {std::int64_t{0}, std::int64_t{5000}, 2 * kMostPieceNbytes}) {
    CHECK_THROWS(std::invalid_argument, ThreadEngine(1, piece_nbytes));
    CHECK_THROWS(std::invalid_argument, UringEngine(1, piece_nbytes, simulated()));
  }
}

TEST(engines_move_bytes_both_ways) {
  for_each_engine([](Engine& engine) {
    for (const std::int64_t nbytes : {0, 1, 4095, 4096, 4097, 5 * 4096 + 17, 100000}) {
      const TemporaryFile file;
      std::vector<std::byte> source = random_bytes(nbytes, 1), target(source.size());
      engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), 77, source)));
      engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 77, target)));
      CHECK(source == target);
    }
  });
}

TEST(engines_tell_when_a_request_was_over_however_late_that_is_asked) {
  for_each_engine([](Engine& engine) {
    for (const std::int64_t nbytes : {0, 50000}) {
      const TemporaryFile file;
      std::vector<std::byte> source = random_bytes(nbytes, 1);
      const Clock::time_point before = Clock::now();
      const Ticket ticket = engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source));
      while (!engine.wait_for(ticket, std::chrono::milliseconds{1})) {
      }
      const Clock::time_point after = Clock::now();
      const Clock::time_point ended = engine.wait(ticket);
      CHECK(before <= ended);
      CHECK(ended <= after);
    }
  });
}

TEST(engines_hold_many_tickets_waited_for_in_any_order) {
  for_each_engine([](Engine& engine) {
    const TemporaryFile file;
    std::vector<std::vector<std::byte>> sources, targets;
    std::vector<Ticket> tickets;
    for (int i = 0; i < 100; ++i) {
      sources.push_back(random_bytes(9000, static_cast<unsigned>(i)));
      targets.emplace_back(9000);
    }
    for (int i = 0; i < 100; ++i) {
      tickets.push_back(engine.submit(Operation::kWrite,
                                      extent_of(file.fd(), i * 9000, sources[static_cast<std::size_t>(i)])));
    }
    for (std::size_t i = tickets.size(); i-- > 0;) engine.wait(tickets[i]);
    tickets.clear();
    for (int i = 0; i < 100; ++i) {
      tickets.push_back(engine.submit(Operation::kRead,
                                      extent_of(file.fd(), i * 9000, targets[static_cast<std::size_t>(i)])));
    }
    for (const Ticket ticket : tickets) engine.wait(ticket);
    CHECK(sources == targets);
  });
}

TEST(engines_serve_several_threads) {
  for_each_engine([](Engine& engine) {
    const TemporaryFile file;
    std::vector<std::thread> users;
    std::vector<int> num_equal(4);
    for (unsigned user = 0; user < 4; ++user) {
      users.emplace_back([&, user] {
        for (unsigned turn = 0; turn < 10; ++turn) {
          const std::int64_t offset = static_cast<std::int64_t>(user) * 30000;
          std::vector<std::byte> source = random_bytes(30000, 10 * user + turn), target(source.size());
          engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), offset, source)));
          engine.wait(engine.submit(Operation::kFlush, Extent{file.fd(), 0, nullptr, 0}));
          engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), offset, target)));
          num_equal[user] += source == target;
        }
      });
    }
    for (std::thread& user : users) user.join();
    for (const int equal : num_equal) CHECK_EQUAL(equal, 10);
  });
}

TEST(engines_flush) {
  for_each_engine([](Engine& engine) {
    const TemporaryFile file;
    engine.wait(engine.submit(Operation::kFlush, Extent{file.fd(), 0, nullptr, 0}));
    const Ticket bad = engine.submit(Operation::kFlush, Extent{-1, 0, nullptr, 0});
    const std::string message = CHECK_THROWS(IoFailure, engine.wait(bad));
    CHECK(message.find("flush of file descriptor -1 failed: Bad file descriptor") != std::string::npos);
  });
}

TEST(engines_tell_the_end_of_a_file) {
  for_each_engine([](Engine& engine) {
    for (const std::int64_t length : {0, 4096, 5000, 39999}) {
      const TemporaryFile file;
      CHECK_EQUAL(::ftruncate(file.fd(), length), 0);
      std::vector<std::byte> target(40000);
      const std::string message = CHECK_THROWS(
          IoFailure, engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 0, target))));
      const std::string expected = "after " + std::to_string(length) + " bytes: unexpected end of file";
      CHECK(message.find(expected) != std::string::npos);
    }
  });
}

TEST(engines_say_which_request_failed) {
  for_each_engine([](Engine& engine) {
    std::vector<std::byte> target(40960);
    try {
      engine.wait(engine.submit(Operation::kWrite, extent_of(-1, 8192, target)));
    } catch (const IoFailure& failure) {
      CHECK_EQUAL(failure.error, EBADF);
      CHECK_EQUAL(failure.fd, -1);
      CHECK_EQUAL(failure.offset, 8192);
      CHECK_EQUAL(failure.length, 40960);
      CHECK_EQUAL(failure.transferred, 0);
      CHECK(failure.operation == Operation::kWrite);
      return;
    }
    CHECK(!"a failure was expected");
  });
}

TEST(engines_know_a_ticket_once) {
  for_each_engine([](Engine& engine) {
    CHECK_THROWS(UnknownTicket, engine.wait(1));
    const Ticket ticket = engine.submit(Operation::kRead, Extent{0, 0, nullptr, 0});
    engine.wait(ticket);
    CHECK_THROWS(UnknownTicket, engine.wait(ticket));
    CHECK_THROWS(UnknownTicket, engine.wait_for(ticket, std::chrono::milliseconds{0}));
  });
}

TEST(engines_finish_what_was_submitted_when_closed) {
  for_each_engine([](Engine& engine) {
    const TemporaryFile file;
    std::vector<std::byte> source = random_bytes(200000, 3);
    const Ticket written = engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source));
    engine.close();
    engine.close();
    CHECK(engine.wait_for(written, std::chrono::milliseconds{0}));
    engine.wait(written);
    CHECK_EQUAL(::lseek(file.fd(), 0, SEEK_END), 200000);
    CHECK_THROWS(std::runtime_error, engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source)));
  });
}

TEST(engines_may_be_closed_by_several_threads_while_others_wait) {
  for_each_engine([](Engine& engine) {
    const TemporaryFile file;
    std::vector<std::byte> source = random_bytes(500000, 4);
    const Ticket ticket = engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source));
    std::thread waiter([&] { engine.wait(ticket); });
    std::thread closer([&] { engine.close(); });
    engine.close();
    closer.join();
    waiter.join();
  });
}

TEST(engines_close_when_destroyed) {
  const TemporaryFile file;
  std::vector<std::byte> source = random_bytes(100000, 5);
  for_each_engine([&](Engine& engine) {
    CHECK_EQUAL(::ftruncate(file.fd(), 0), 0);
    engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source));
  });
  CHECK_EQUAL(::lseek(file.fd(), 0, SEEK_END), 100000);
}

TEST(engines_move_registered_memory_and_what_lies_beside_it) {
  for_each_engine([](Engine& engine) {
    const TemporaryFile file;
    std::vector<std::byte> source = random_bytes(100000, 6), target(source.size());
    // Of an engine that cannot, and a system that may not, the answer is an errno, and all goes on.
    const int once = engine.register_memory(source.data() + 10000, 50000);
    CHECK_EQUAL(engine.register_memory(source.data() + 10000, 50000), once);
    engine.register_memory(target.data(), 4096);
    engine.register_memory(target.data() + 20000, 80000);
    engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source)));
    engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 0, target)));
    CHECK(source == target);
    engine.close();
  });
}

TEST(engines_refuse_to_work_in_a_forked_child) {
  std::vector<std::unique_ptr<Engine>> engines;
  engines.push_back(std::make_unique<ThreadEngine>(2));
  engines.push_back(std::make_unique<UringEngine>(4, 4096, simulated()));
  if (has_kernel_ring()) engines.push_back(std::make_unique<UringEngine>(4, 4096));
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 0;
    for (std::unique_ptr<Engine>& engine : engines) {
      try {
        engine->submit(Operation::kRead, Extent{0, 0, nullptr, 0});
        status = 1;
      } catch (const std::runtime_error&) {
      }
      engine->close();
      engine.reset();
    }
    ::_exit(status);
  }
  int status = -1;
  CHECK_EQUAL(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
}
