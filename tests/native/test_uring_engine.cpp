// The ring's engine over scripted completions, of a simulated ring and of the kernel's.

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "check.hpp"
#include "io/failure.hpp"
#include "io/uring_engine.hpp"
#include "rings.hpp"
#include "temporary_file.hpp"

using namespace zerooffload::io;

namespace {

constexpr std::int64_t kPiece = 4096;

// Writes with an engine of 8 entries under a script, reads back without one.
void round_trip(const Script& script, std::int64_t nbytes = 100000) {
  for (const OpenRing& inner : {simulated(), OpenRing(open_kernel_ring)}) {
    if (inner.target_type() != simulated().target_type() && !has_kernel_ring()) continue;
    const TemporaryFile file;
    UringEngine engine(8, kPiece, scripted(inner, script));
    std::vector<std::byte> source = random_bytes(nbytes, 1), target(source.size());
    engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source)));
    engine.wait(engine.submit(Operation::kRead, extent_of(file.fd(), 0, target)));
    engine.wait(engine.submit(Operation::kFlush, Extent{file.fd(), 0, nullptr, 0}));
    CHECK(source == target);
  }
}

IoFailure failure_of(UringEngine& engine, Operation operation, const Extent& extent) {
  try {
    engine.wait(engine.submit(operation, extent));
  } catch (const IoFailure& failure) {
    return failure;
  }
  throw check::Failed("a failure was expected");
}

}  // namespace

TEST(uring_engine_resumes_short_transfers) {
  round_trip({[](const Ring::Entry& entry) { return std::min<std::int64_t>(entry.extent.nbytes, 1000); }});
}

TEST(uring_engine_repeats_what_was_interrupted) {
  auto count = std::make_shared<int>(0);
  round_trip(
      {[count](const Ring::Entry& entry) { return ++*count % 3 == 0 ? entry.extent.nbytes : -EINTR; }});
}

TEST(uring_engine_lets_a_worker_do_what_would_block) {
  auto num_at_once = std::make_shared<int>(0), num_on_worker = std::make_shared<int>(0);
  round_trip({[=](const Ring::Entry& entry) {
               if (entry.issue == Ring::Issue::kOnWorker) {
                 ++*num_on_worker;
                 return entry.extent.nbytes;
               }
               ++*num_at_once;
               return std::int64_t{-EAGAIN};
             }},
             5 * kPiece);
  CHECK_EQUAL(*num_on_worker, *num_at_once);
  CHECK(*num_on_worker > 0);
}

TEST(uring_engine_takes_no_for_an_answer_from_a_worker) {
  UringEngine engine(8, kPiece, scripted(simulated(), {[](const Ring::Entry&) { return -EAGAIN; }}));
  std::vector<std::byte> target(10);
  CHECK_EQUAL(failure_of(engine, Operation::kRead, extent_of(0, 0, target)).error, EAGAIN);
}

TEST(uring_engine_reports_the_first_byte_that_did_not_move) {
  // Pieces 3 and 7 fail, the third after 1000 bytes, whichever comes first.
  const Script script{[](const Ring::Entry& entry) {
    const std::int64_t offset = entry.extent.offset;
    if (offset == 3 * kPiece) return std::int64_t{1000};
    if (offset == 3 * kPiece + 1000) return std::int64_t{-EIO};
    return offset == 7 * kPiece ? std::int64_t{-ENOSPC} : entry.extent.nbytes;
  }};
  const TemporaryFile file;
  UringEngine engine(8, kPiece, scripted(simulated(), script));
  std::vector<std::byte> source = random_bytes(20 * kPiece, 1);
  for (int turn = 0; turn < 20; ++turn) {
    const IoFailure failure = failure_of(engine, Operation::kWrite, extent_of(file.fd(), 0, source));
    CHECK_EQUAL(failure.error, EIO);
    CHECK_EQUAL(failure.transferred, 3 * kPiece + 1000);
    CHECK_EQUAL(failure.length, 20 * kPiece);
  }
}

TEST(uring_engine_does_not_take_a_write_of_nothing_for_success) {
  UringEngine engine(8, kPiece, scripted(simulated(), {[](const Ring::Entry&) { return 0; }}));
  const TemporaryFile file;
  std::vector<std::byte> source = random_bytes(10, 1);
  CHECK_EQUAL(failure_of(engine, Operation::kWrite, extent_of(file.fd(), 0, source)).error, EIO);
}

TEST(uring_engine_does_not_repeat_a_failed_flush) {
  auto num_flushes = std::make_shared<int>(0);
  const Script script{[=](const Ring::Entry&) { return ++*num_flushes == 1 ? -EIO : 0; }};
  UringEngine engine(8, kPiece, scripted(simulated(), script));
  CHECK_EQUAL(failure_of(engine, Operation::kFlush, Extent{0, 0, nullptr, 0}).error, EIO);
  CHECK_EQUAL(*num_flushes, 1);
}

TEST(uring_engine_enters_the_ring_again_when_that_passes) {
  auto count = std::make_shared<int>(0);
  Script script;
  script.enter = [count] {
    static constexpr int kErrors[] = {EINTR, 0, EAGAIN, EBUSY, 0};
    return kErrors[++*count % 5];
  };
  round_trip(script, 12 * kPiece);
}

TEST(uring_engine_fails_what_a_broken_ring_does_not_take) {
  auto count = std::make_shared<int>(0);
  Script script;
  // The third time, and that is after the first request.
  script.enter = [count] { return ++*count < 3 ? 0 : EBADF; };
  UringEngine engine(4, kPiece, scripted(simulated(), script));
  const TemporaryFile file;
  std::vector<std::byte> source = random_bytes(50 * kPiece, 1);
  for (int turn = 0; turn < 3; ++turn) {
    const IoFailure failure = failure_of(engine, Operation::kWrite, extent_of(file.fd(), 0, source));
    CHECK_EQUAL(failure.error, EBADF);
  }
  engine.close();
}

TEST(uring_engine_never_has_more_under_way_than_the_ring_has_places) {
  auto ids = std::make_shared<std::map<std::uint32_t, int>>();
  round_trip({[ids](const Ring::Entry& entry) {
    ++(*ids)[entry.id];
    return entry.extent.nbytes;
  }});
  CHECK(ids->size() <= 8);
  CHECK(ids->rbegin()->first < 8);
}

TEST(uring_engine_uses_registered_memory_where_a_piece_lies_in_it) {
  auto buffers = std::make_shared<std::map<std::int64_t, int>>();
  const Script script{[buffers](const Ring::Entry& entry) {
    (*buffers)[entry.extent.offset] = entry.buffer;
    return entry.extent.nbytes;
  }};
  const TemporaryFile file;
  UringEngine engine(8, kPiece, scripted(simulated(), script));
  std::vector<std::byte> source = random_bytes(6 * kPiece, 1);
  CHECK_EQUAL(engine.register_memory(source.data() + kPiece, 2 * kPiece), 0);
  CHECK_EQUAL(engine.register_memory(source.data() + kPiece, kPiece), 0);  // lies in the first
  CHECK_EQUAL(engine.register_memory(source.data() + 4 * kPiece, kPiece + 1), 0);
  engine.wait(engine.submit(Operation::kWrite, extent_of(file.fd(), 0, source)));
  const std::vector<int> expected = {-1, 0, 0, -1, 1, -1};
  for (std::size_t piece = 0; piece < expected.size(); ++piece) {
    CHECK_EQUAL(buffers->at(static_cast<std::int64_t>(piece) * kPiece), expected[piece]);
  }
}

TEST(uring_engine_says_why_a_ring_cannot_be_opened) {
  const OpenRing forbidden = [](std::uint32_t) -> std::unique_ptr<Ring> {
    throw std::system_error(EPERM, std::generic_category(), "io_uring_setup");
  };
  const std::string message = CHECK_THROWS(std::system_error, UringEngine(8, kPiece, forbidden));
  CHECK(message.find("io_uring_setup") != std::string::npos);
}
