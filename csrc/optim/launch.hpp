#pragma once

// How a kernel is started; private to this folder.

#include <cstdint>
#include <initializer_list>

#include "base/dtype.hpp"
#include "base/float_environment.hpp"
#include "base/thread_pool.hpp"
#include "optim/kernel_table.hpp"

namespace zerooffload::optim {

// The kernels of the active CPU target.
const KernelTable& active_kernels();

constexpr std::int64_t item_bytes(Dtype dtype) noexcept { return kItemBytes[static_cast<int>(dtype)]; }

struct Argument {
  const char* name;
  const void* address;
  std::int64_t item_bytes;
};
void check_arguments(std::initializer_list<Argument> arguments, std::int64_t numel);

constexpr std::int64_t num_blocks(std::int64_t numel) noexcept {
  return (numel + kBlockNumel - 1) / kBlockNumel;
}

// Calls kernel(begin, end) on element ranges that cover [0, numel) and are cut between blocks.
template <typename Kernel>
void launch(ThreadPool& pool, std::int64_t numel, Kernel&& kernel) {
  for_block_ranges(pool, num_blocks(numel), [&](std::int64_t first_block, std::int64_t end_block) {
    const DefaultFloatEnvironment environment;
    const std::int64_t end = end_block * kBlockNumel;
    kernel(first_block * kBlockNumel, end < numel ? end : numel);
  });
}

}  // namespace zerooffload::optim
