#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"

namespace zerooffload::optim {

// out[b] = sum of the squares of elements [b * kBlockNumel, (b + 1) * kBlockNumel) of grad, in float64 and in
// a fixed order (kernels.cpp), for ceil(numel / kBlockNumel) blocks.
void square_sums(ThreadPool& pool, const void* grad, Dtype grad_dtype, std::int64_t numel, double* out);

// target += source; both of one dtype, bfloat16 rounded to nearest even from the float32 sum.
void accumulate(ThreadPool& pool, void* target, const void* source, Dtype dtype, std::int64_t numel);

}  // namespace zerooffload::optim
