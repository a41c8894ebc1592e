#include "io/failure.hpp"

#include <cerrno>
#include <string>
#include <system_error>

namespace zerooffload::io {
namespace {

std::string describe(Operation operation, const Extent& extent, const Outcome& outcome) {
  // Not strerror, which shares one buffer between threads.
  const std::string reason =
      outcome.error == kEndOfFile ? "unexpected end of file" : std::generic_category().message(outcome.error);
  if (operation == Operation::kFlush) {
    return "flush of file descriptor " + std::to_string(extent.fd) + " failed: " + reason;
  }
  return std::string(operation_name(operation)) + " of " + std::to_string(extent.nbytes) +
         " bytes at offset " + std::to_string(extent.offset) + " of file descriptor " +
         std::to_string(extent.fd) + " failed after " + std::to_string(outcome.transferred) +
         " bytes: " + reason;
}

}  // namespace

IoFailure::IoFailure(Operation operation_, const Extent& extent, const Outcome& outcome)
    : std::runtime_error(describe(operation_, extent, outcome)),
      operation(operation_),
      error(outcome.error == kEndOfFile ? EIO : outcome.error),
      fd(extent.fd),
      offset(extent.offset),
      length(extent.nbytes),
      transferred(outcome.transferred) {}

}  // namespace zerooffload::io
