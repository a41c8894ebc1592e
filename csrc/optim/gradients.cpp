#include "optim/gradients.hpp"

#include "optim/launch.hpp"

namespace zerooffload::optim {

void square_sums(ThreadPool& pool, const void* grad, Dtype grad_dtype, std::int64_t numel, double* out) {
  check_arguments({{"grad", grad, item_bytes(grad_dtype)}, {"out", out, 8}}, numel);
  const auto kernel = active_kernels().square_sum[static_cast<int>(grad_dtype)];
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t start = begin; start < end; start += kBlockNumel) {
      const std::int64_t stop = start + kBlockNumel;
      out[start / kBlockNumel] = kernel(grad, start, stop < end ? stop : end);
    }
  });
}

void accumulate(ThreadPool& pool, void* target, const void* source, Dtype dtype, std::int64_t numel) {
  check_arguments({{"target", target, item_bytes(dtype)}, {"source", source, item_bytes(dtype)}}, numel);
  const auto kernel = active_kernels().accumulate[static_cast<int>(dtype)];
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) { kernel(target, source, begin, end); });
}

}  // namespace zerooffload::optim
