// Sums that are rounded once.

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "optim/exact_sum.hpp"

using zerooffload::optim::exact_sum;

namespace {

constexpr double kLeast = std::numeric_limits<double>::denorm_min();
constexpr double kMost = std::numeric_limits<double>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double sum(const std::vector<double>& values) {
  return exact_sum(values.data(), static_cast<std::int64_t>(values.size()));
}

}  // namespace

TEST(nothing_is_lost_before_the_sum_is_rounded) {
  CHECK(exact_sum(nullptr, 0) == 0.0);
  CHECK(sum({-0.0}) == 0.0);
  CHECK(sum({kLeast, kLeast}) == 2 * kLeast);
  CHECK(sum(std::vector<double>(1024, 0x1p-60 / 1024)) == 0x1p-60);
  // One after the other, no small one would change the sum.
  std::vector<double> values(1 << 12, 0x1p-53);
  values.insert(values.begin(), 1.0);
  CHECK(sum(values) == 1.0 + 0x1p-41);
}

TEST(sums_are_rounded_to_nearest_even) {
  const double next = 1.0 + 0x1p-52;
  CHECK(sum({1.0, 0x1p-53}) == 1.0);
  CHECK(sum({next, 0x1p-53}) == 1.0 + 0x1p-51);
  CHECK(sum({1.0, 0x1p-53, kLeast}) == next);
  CHECK(sum({2.0 - 0x1p-52, 0x1p-53}) == 2.0);
  CHECK(sum({0x1p-1022, kLeast}) == 0x1p-1022 + kLeast);
}

TEST(the_largest_sums) {
  CHECK(sum({kMost, 0x1p969}) == kMost);
  CHECK(sum({kMost, 0x1p970}) == kInfinity);
  CHECK(sum(std::vector<double>(1000, kMost)) == kInfinity);
  CHECK(sum({1.0, kInfinity}) == kInfinity);
  CHECK(std::isnan(sum({1.0, std::nan(""), kInfinity})));
  CHECK_THROWS(std::invalid_argument, sum({1.0, -kLeast}));
  CHECK_THROWS(std::invalid_argument, sum({-kInfinity}));
}
