#pragma once

#include <cstdint>

#include "base/thread_pool.hpp"

namespace zerooffload::optim {

// A float32 master to bfloat16 and 16-bit remainder, and back: exact for all but NaNs, which become
// 0x7FC00000.
void split_fp32(ThreadPool& pool, const float* source, std::uint16_t* param, std::int16_t* remainder,
                std::int64_t numel);
void join_fp32(ThreadPool& pool, const std::uint16_t* param, const std::int16_t* remainder, float* target,
               std::int64_t numel);

}  // namespace zerooffload::optim
