#include "optim/adamw.hpp"

#include "optim/launch.hpp"

namespace zerooffload::optim {

void adamw_fp32(ThreadPool& pool, const AdamWFp32Arrays& arrays, Dtype grad_dtype, std::int64_t numel,
                const AdamWScalars& scalars) {
  check_arguments({{"param", arrays.param, 4},
                   {"exp_avg", arrays.exp_avg, 4},
                   {"exp_avg_sq", arrays.exp_avg_sq, 4},
                   {"grad", arrays.grad, item_bytes(grad_dtype)}},
                  numel);
  const auto kernel = active_kernels().adamw_fp32[static_cast<int>(grad_dtype)];
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) { kernel(arrays, scalars, begin, end); });
}

void adamw_bf16(ThreadPool& pool, const AdamWBf16Arrays& arrays, Dtype grad_dtype, std::int64_t numel,
                const AdamWScalars& scalars) {
  check_arguments({{"param", arrays.param, 2},
                   {"remainder", arrays.remainder, 2},
                   {"exp_avg", arrays.exp_avg, 4},
                   {"exp_avg_sq", arrays.exp_avg_sq, 4},
                   {"grad", arrays.grad, item_bytes(grad_dtype)}},
                  numel);
  const auto kernel = active_kernels().adamw_bf16[static_cast<int>(grad_dtype)];
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) { kernel(arrays, scalars, begin, end); });
}

}  // namespace zerooffload::optim
