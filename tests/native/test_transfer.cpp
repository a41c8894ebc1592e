// The transfer loop over scripted system calls.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "io/failure.hpp"
#include "io/transfer.hpp"

using namespace zerooffload::io;

namespace {

struct Answer {
  ssize_t result;
  int error = 0;
};
struct Call {
  std::int64_t offset;
  std::size_t nbytes;
};

// Function pointers carry no state, so the script is a global of this file.
std::vector<Answer> answers;
std::vector<Call> asked;

ssize_t answer(std::size_t nbytes, off_t offset) {
  asked.push_back({offset, nbytes});
  const Answer next = answers.at(asked.size() - 1);
  errno = next.error;
  return next.result;
}

const SystemCalls kScripted{
    [](int, void*, std::size_t nbytes, off_t offset) { return answer(nbytes, offset); },
    [](int, const void*, std::size_t nbytes, off_t offset) { return answer(nbytes, offset); }};

Outcome play(Operation operation, std::vector<Answer> script) {
  answers = std::move(script);
  asked.clear();
  static std::byte buffer[100];
  return transfer(operation, Extent{3, 1000, buffer, 100}, kScripted);
}

}  // namespace

TEST(transfer_asks_once_for_a_whole_extent) {
  const Outcome outcome = play(Operation::kRead, {{100}});
  CHECK_EQUAL(outcome.transferred, 100);
  CHECK_EQUAL(outcome.error, 0);
  CHECK_EQUAL(asked.size(), std::size_t{1});
}

TEST(transfer_resumes_short_ones_where_they_ended) {
  for (const Operation operation : {Operation::kRead, Operation::kWrite}) {
    const Outcome outcome = play(operation, {{30}, {69}, {1}});
    CHECK_EQUAL(outcome.error, 0);
    CHECK_EQUAL(outcome.transferred, 100);
    CHECK_EQUAL(asked.at(1).offset, 1030);
    CHECK_EQUAL(asked.at(1).nbytes, std::size_t{70});
    CHECK_EQUAL(asked.at(2).offset, 1099);
  }
}

TEST(transfer_repeats_interrupted_ones) {
  const Outcome outcome = play(Operation::kWrite, {{-1, EINTR}, {40}, {-1, EINTR}, {-1, EINTR}, {60}});
  CHECK_EQUAL(outcome.error, 0);
  CHECK_EQUAL(outcome.transferred, 100);
}

TEST(transfer_tells_how_far_it_came) {
  const Outcome outcome = play(Operation::kRead, {{30}, {-1, EINVAL}});
  CHECK_EQUAL(outcome.error, EINVAL);
  CHECK_EQUAL(outcome.transferred, 30);
}

TEST(transfer_of_nothing_is_the_end_of_the_file_or_an_error) {
  CHECK_EQUAL(play(Operation::kRead, {{30}, {0}}).error, kEndOfFile);
  CHECK_EQUAL(play(Operation::kWrite, {{0}}).error, EIO);
}

TEST(transfer_flushes_and_repeats_what_was_interrupted_but_nothing_else) {
  static std::vector<int> errors;
  errors = {EINTR, EINTR, 0};
  SystemCalls calls = kScripted;
  calls.flush = [](int fd) {
    CHECK_EQUAL(fd, 7);
    errno = errors.front();
    errors.erase(errors.begin());
    return errno == 0 ? 0 : -1;
  };
  const Extent file{7, 0, nullptr, 0};
  CHECK_EQUAL(transfer(Operation::kFlush, file, calls).error, 0);
  CHECK(errors.empty());
  errors = {EIO, 0};
  CHECK_EQUAL(transfer(Operation::kFlush, file, calls).error, EIO);
  CHECK_EQUAL(errors.size(), std::size_t{1});
}

TEST(failure_says_all_that_is_known) {
  const IoFailure failure(Operation::kRead, Extent{3, 1000, nullptr, 100}, Outcome{30, kEndOfFile});
  CHECK_EQUAL(failure.error, EIO);
  CHECK_EQUAL(failure.transferred, 30);
  CHECK_EQUAL(
      std::string(failure.what()),
      "read of 100 bytes at offset 1000 of file descriptor 3 failed after 30 bytes: unexpected end of file");
  const IoFailure flush(Operation::kFlush, Extent{3, 0, nullptr, 0}, Outcome{0, EIO});
  CHECK_EQUAL(std::string(flush.what()), "flush of file descriptor 3 failed: Input/output error");
}
