#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"
#include "optim/kernel_table.hpp"

namespace zerooffload::optim {

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
