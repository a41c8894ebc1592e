#pragma once

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"
#include "optim/kernel_table.hpp"

namespace zerooffload::optim {

// One fused AdamW pass with the active CPU target, in place. The bits do not depend on the number of threads,
// on the target, on alignment, or on how a caller cuts its arrays.
//
// All entry points of this folder: arrays do not overlap, and lie on multiples of their item size
// (std::invalid_argument otherwise, also for a null pointer with numel > 0 or a negative numel).
void adamw_fp32(ThreadPool& pool, const AdamWFp32Arrays& arrays, Dtype grad_dtype, std::int64_t numel,
                const AdamWScalars& scalars);
void adamw_bf16(ThreadPool& pool, const AdamWBf16Arrays& arrays, Dtype grad_dtype, std::int64_t numel,
                const AdamWScalars& scalars);

}  // namespace zerooffload::optim
