#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "check.hpp"
#include "io/transfer.hpp"

class TemporaryFile {
 public:
  TemporaryFile() : file_(std::tmpfile()) { CHECK(file_ != nullptr); }
  ~TemporaryFile() { std::fclose(file_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  int fd() const { return ::fileno(file_); }

 private:
  std::FILE* file_;
};

inline std::vector<std::byte> random_bytes(std::int64_t nbytes, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::byte> data(static_cast<std::size_t>(nbytes));
  for (std::byte& value : data) value = static_cast<std::byte>(generator());
  return data;
}

inline zerooffload::io::Extent extent_of(int fd, std::int64_t offset, std::vector<std::byte>& data) {
  return {fd, offset, data.data(), static_cast<std::int64_t>(data.size())};
}
