#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"
#include "optim/kernel_table.hpp"

namespace zerooffload::optim {

// What a step works on. It is in place, or, where an origin is given, the old values lie that many bytes from
// the new ones (parameters, and the companion and moments), in the same layout, and the new ones are written
// past the cache. The float32 master of a parameter is
//   kFloat32   the parameter
//   kBfloat16  (param << 16) + int16 remainder, as bits; `companion` is the remainder
//   kFloat16   `companion`; the parameter is written only
struct StepArrays {
  void* param = nullptr;
  Dtype param_dtype = Dtype::kFloat32;
  void* companion = nullptr;
  const void* grad = nullptr;
  Dtype grad_dtype = Dtype::kFloat32;
  MomentFormat moment_format = MomentFormat::kFloat32;
  MomentArrays moments = {};
  std::ptrdiff_t param_origin = 0;
  std::ptrdiff_t record_origin = 0;
};

// One pass of a rule with the active CPU target. The bits do not depend on the number of threads, on the
// target, on alignment, or on how a caller cuts its arrays, as long as `first_index` is the index of the
// first element in whatever was cut (and, for kBlock8, cuts fall on multiples of kScaleBlockNumel).
//
// scalars       the rule's, num_scalars of them
// first_index, seed  of the noise that moments in fewer bits are rounded with
//
// All entry points of this folder: arrays do not overlap, and lie on multiples of their item size
// (std::invalid_argument otherwise, also for a null pointer with numel > 0 or a negative numel).
void step(ThreadPool& pool, Rule rule, const StepArrays& arrays, std::int64_t numel, const float* scalars,
          std::int64_t first_index, std::uint32_t seed);

// What the active target knows of a rule.
const RuleEntry& rule_entry(Rule rule);

}  // namespace zerooffload::optim
