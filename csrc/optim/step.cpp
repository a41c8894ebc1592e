#include "optim/step.hpp"

#include "optim/launch.hpp"

namespace zerooffload::optim {
namespace {

void check(const RuleEntry& rule, const StepArrays& arrays, std::int64_t numel) {
  check_arguments({{"param", arrays.param, item_bytes(arrays.param_dtype)},
                   {"grad", arrays.grad, item_bytes(arrays.grad_dtype)}},
                  numel);
  if (arrays.param_dtype != Dtype::kFloat32) {
    check_arguments({{"companion", arrays.companion, kCompanionBytes[static_cast<int>(arrays.param_dtype)]}},
                    numel);
  }
  for (int i = 0; i < rule.num_moments; ++i) {
    check_arguments(
        {{"moment", arrays.moments.values[i], kMomentBytes[static_cast<int>(arrays.moment_format)]}}, numel);
    if (arrays.moment_format == MomentFormat::kBlock8) {
      check_arguments({{"exponents", arrays.moments.exponents[i], 1}}, numel);
    }
  }
}

}  // namespace

const RuleEntry& rule_entry(Rule rule) { return active_kernels().rules[static_cast<int>(rule)]; }

void step(ThreadPool& pool, Rule rule, const StepArrays& arrays, std::int64_t numel, const float* scalars,
          std::int64_t first_index, std::uint32_t seed) {
  const KernelTable& kernels = active_kernels();
  const RuleEntry& entry = kernels.rules[static_cast<int>(rule)];
  check(entry, arrays, numel);
  const auto index = static_cast<std::uint32_t>(first_index);
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) {
    kernels.step_range(entry, arrays, begin, end, scalars, index, seed);
  });
}

}  // namespace zerooffload::optim
