#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"

namespace zerooffload::optim {

// sums[b] = sum of the squares of elements [b * kBlockNumel, (b + 1) * kBlockNumel), in float64 and in a
// fixed order (kernels.cpp), for ceil(numel / kBlockNumel) blocks. It is finite if and only if all of them
// are: the squares of all floats together are far from the largest double.
void square_sums(ThreadPool& pool, const void* grad, Dtype grad_dtype, std::int64_t numel, double* sums);

// In one pass: target += source (or, with kReplace, target = source), rounded once to the target's type, and
// the square sums of the target as it then is. Types: equal, or a float32 target.
enum class Arrival : std::uint8_t { kAdd, kReplace };
void arrive(ThreadPool& pool, Arrival arrival, void* target, Dtype target_dtype, const void* source,
            Dtype source_dtype, std::int64_t numel, double* sums);

}  // namespace zerooffload::optim
