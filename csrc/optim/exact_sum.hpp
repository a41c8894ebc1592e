#pragma once

#include <cstdint>

namespace zerooffload::optim {

// The sum of `numel` numbers, none of which is negative, as if it had been added exactly and rounded once, to
// nearest even: no order of them gives another. Infinite where that is what the largest double rounds to, NaN
// where one is.
double exact_sum(const double* values, std::int64_t numel);

}  // namespace zerooffload::optim
