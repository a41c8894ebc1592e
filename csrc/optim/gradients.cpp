#include "optim/gradients.hpp"

#include <stdexcept>

#include "optim/launch.hpp"

namespace zerooffload::optim {
namespace {

// Calls kernel(start, numel) for each block and keeps what it returns.
template <typename Kernel>
void by_block(ThreadPool& pool, std::int64_t numel, double* sums, Kernel&& kernel) {
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t start = begin; start < end; start += kBlockNumel) {
      const std::int64_t stop = start + kBlockNumel;
      sums[start / kBlockNumel] = kernel(start, (stop < end ? stop : end) - start);
    }
  });
}

}  // namespace

void square_sums(ThreadPool& pool, const void* grad, Dtype grad_dtype, std::int64_t numel, double* sums) {
  const std::int64_t bytes = item_bytes(grad_dtype);
  check_arguments({{"grad", grad, bytes}, {"sums", sums, 8}}, numel);
  const auto kernel = active_kernels().square_sum[static_cast<int>(grad_dtype)];
  const char* const elements = static_cast<const char*>(grad);
  by_block(pool, numel, sums,
           [&](std::int64_t start, std::int64_t length) { return kernel(elements + start * bytes, length); });
}

void arrive(ThreadPool& pool, Arrival arrival, void* target, Dtype target_dtype, const void* source,
            Dtype source_dtype, std::int64_t numel, double* sums) {
  const std::int64_t target_bytes = item_bytes(target_dtype), source_bytes = item_bytes(source_dtype);
  check_arguments({{"target", target, target_bytes}, {"source", source, source_bytes}, {"sums", sums, 8}},
                  numel);
  const KernelTable& table = active_kernels();
  const auto& kernels = arrival == Arrival::kAdd ? table.accumulate : table.replace;
  const auto kernel = kernels[static_cast<int>(target_dtype)][static_cast<int>(source_dtype)];
  if (kernel == nullptr) {
    throw std::invalid_argument("source: expected the target's type, or a float32 target");
  }
  char* const targets = static_cast<char*>(target);
  const char* const sources = static_cast<const char*>(source);
  by_block(pool, numel, sums, [&](std::int64_t start, std::int64_t length) {
    return kernel(targets + start * target_bytes, sources + start * source_bytes, length);
  });
}

}  // namespace zerooffload::optim
