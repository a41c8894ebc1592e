#include "optim/master_weights.hpp"

#include "optim/launch.hpp"

namespace zerooffload::optim {

void split_fp32(ThreadPool& pool, const float* source, std::uint16_t* param, std::int16_t* remainder,
                std::int64_t numel) {
  check_arguments({{"source", source, 4}, {"param", param, 2}, {"remainder", remainder, 2}}, numel);
  const auto kernel = active_kernels().split;
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) {
    kernel(source + begin, param + begin, remainder + begin, end - begin);
  });
}

void join_fp32(ThreadPool& pool, const std::uint16_t* param, const std::int16_t* remainder, float* target,
               std::int64_t numel) {
  check_arguments({{"param", param, 2}, {"remainder", remainder, 2}, {"target", target, 4}}, numel);
  const auto kernel = active_kernels().join;
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) {
    kernel(param + begin, remainder + begin, target + begin, end - begin);
  });
}

}  // namespace zerooffload::optim
