// Square sums, and gradients that arrive.

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "optim/gradients.hpp"
#include "scalar_reference.hpp"
#include "settings.hpp"
#include "states.hpp"

using namespace zerooffload;
using optim::Arrival;
using states::Array;

namespace {

constexpr std::int64_t kLengths[] = {0, 1, 15, 16, 17, 511, 513, 4095, 4096, 4097, 2 * 4096 + 700};

// From denormals over ordinary numbers to infinity, and now and then a NaN.
Array random_array(Dtype dtype, std::int64_t numel, std::uint64_t seed, std::int64_t head = 0) {
  const bool is_half = dtype == Dtype::kFloat16;
  Array array(states::kind_of(dtype), numel, head);
  states::Numbers numbers(seed);
  for (std::int64_t i = 0; i < numel; ++i) {
    switch (numbers.bits() % 4) {
      case 0:
        array.set_float(i, is_half ? numbers.number(-26, -14) : numbers.number(-149, -120));
        break;
      case 1:
        array.set_float(i, is_half ? numbers.number(10, 15) : numbers.number(110, 127));
        break;
      default:
        array.set_float(i, numbers.number(-10, 2));
    }
  }
  if (numel > 4096) array.set_float(4096, std::numeric_limits<float>::quiet_NaN());
  if (numel > 600) array.set_float(600, std::numeric_limits<float>::infinity());
  return array;
}

void unite_nan(double& value) {
  if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
}

Array as_bytes(std::vector<double> sums) {
  Array bytes(states::Kind::kByte, static_cast<std::int64_t>(sums.size() * sizeof(double)), 0);
  for (double& sum : sums) unite_nan(sum);
  if (!sums.empty()) std::memcpy(bytes.data(), sums.data(), sums.size() * sizeof(double));
  return bytes;
}

std::vector<double> expected_sums(Array& array) {
  std::vector<double> sums;
  for (std::int64_t start = 0; start < array.numel; start += 4096) {
    double lanes[16] = {};
    for (std::int64_t i = start; i < start + 4096 && i < array.numel; ++i) {
      const double value = array.get_float(i);
      volatile double square = value * value;
      lanes[i % 16] += square;
    }
    for (int width = 8; width >= 1; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    sums.push_back(lanes[0]);
  }
  return sums;
}

std::vector<double> empty_sums(std::int64_t numel) {
  return std::vector<double>(static_cast<std::size_t>((numel + 4095) / 4096), -1.0);
}

Dtype dtype_of(const Array& array) {
  return array.kind == states::Kind::kFloat32
             ? Dtype::kFloat32
             : (array.kind == states::Kind::kBfloat16 ? Dtype::kBfloat16 : Dtype::kFloat16);
}

std::vector<double> arrive(ThreadPool& pool, Arrival arrival, Array& target, Array& source) {
  std::vector<double> sums = empty_sums(target.numel);
  optim::arrive(pool, arrival, target.data(), dtype_of(target), source.data(), dtype_of(source), target.numel,
                sums.data());
  return sums;
}

void expected_arrival(Arrival arrival, Array& target, Array& source) {
  for (std::int64_t i = 0; i < target.numel; ++i) {
    volatile float value = source.get_float(i);
    if (arrival == Arrival::kAdd) value = target.get_float(i) + value;
    target.set_float(i, value);
  }
}

// Target and source types of an arrival.
std::vector<std::pair<Dtype, Dtype>> pairs_that_exist() {
  std::vector<std::pair<Dtype, Dtype>> pairs;
  for (const Dtype dtype : states::kDtypes) {
    pairs.emplace_back(Dtype::kFloat32, dtype);
    if (dtype != Dtype::kFloat32) pairs.emplace_back(dtype, dtype);
  }
  return pairs;
}

}  // namespace

TEST(square_sums_follow_the_documented_order) {
  for (const Dtype dtype : states::kDtypes) {
    for (const std::int64_t numel : kLengths) {
      for (const std::int64_t head : {0, 1, 7}) {
        Array grad = random_array(dtype, numel, 41, head);
        const Array expected = as_bytes(expected_sums(grad));
        for_each_target({1}, [&](ThreadPool& pool) {
          std::vector<double> got = empty_sums(numel);
          optim::square_sums(pool, grad.data(), dtype, numel, got.data());
          CHECK(states::same_bits(expected, as_bytes(got)));
        });
      }
    }
  }
}

TEST(arrive_equals_the_reference_and_sums_squares) {
  for (const auto& [target_dtype, source_dtype] : pairs_that_exist()) {
    for (const Arrival arrival : {Arrival::kAdd, Arrival::kReplace}) {
      for (const std::int64_t numel : kLengths) {
        const std::int64_t head = numel % 5;
        const Array start = random_array(target_dtype, numel, 43, head);
        Array source = random_array(source_dtype, numel, 47, head + 1);
        Array expected = start;
        expected_arrival(arrival, expected, source);
        const Array sums = as_bytes(expected_sums(expected));
        for_each_target({1}, [&](ThreadPool& pool) {
          Array got = start;
          const std::vector<double> got_sums = arrive(pool, arrival, got, source);
          CHECK(states::same_bits(expected, got));
          CHECK(states::same_bits(sums, as_bytes(got_sums)));
        });
      }
    }
  }
}

TEST(gradients_give_the_same_bits_with_any_number_of_threads) {
  constexpr std::int64_t kNumel = 66 * 4096 + 5;
  for (const auto& [target_dtype, source_dtype] : pairs_that_exist()) {
    const Array start = random_array(target_dtype, kNumel, 53);
    Array source = random_array(source_dtype, kNumel, 59);
    Array expected = start;
    cpu::set_target("baseline");
    ThreadPool one(1);
    const Array sums = as_bytes(arrive(one, Arrival::kAdd, expected, source));
    for_each_target({2, 3, 4}, [&](ThreadPool& pool) {
      Array got = start;
      CHECK(states::same_bits(sums, as_bytes(arrive(pool, Arrival::kAdd, got, source))));
      CHECK(states::same_bits(expected, got));
      std::vector<double> alone = empty_sums(kNumel);
      optim::square_sums(pool, got.data(), dtype_of(got), kNumel, alone.data());
      CHECK(states::same_bits(sums, as_bytes(alone)));
    });
  }
}

TEST(arrive_rounds_ties_to_even) {
  // 1 + 2^-8 lies half way between two bfloat16; so does 1 + 3 * 2^-8: one rounds down, the other up.
  for_each_target({1}, [](ThreadPool& pool) {
    Array target(states::Kind::kBfloat16, 2, 0), source(states::Kind::kBfloat16, 2, 0);
    target.set_float(0, 1.0f);
    target.set_float(1, 1.0f + 1.0f / 128);
    for (const int i : {0, 1}) source.set_float(i, 1.0f / 256);
    const std::vector<double> sums = arrive(pool, Arrival::kAdd, target, source);
    CHECK_EQUAL(target.get_float(0), 1.0f);
    CHECK_EQUAL(target.get_float(1), 1.0f + 2.0f / 128);
    CHECK_EQUAL(sums[0], 1.0 + (1.0 + 2.0 / 128) * (1.0 + 2.0 / 128));
  });
}

TEST(gradients_refuse_bad_arguments_by_name) {
  ThreadPool pool(1);
  std::vector<float> data(8);
  std::vector<double> sums(1);
  const auto spoiled = [](auto* address) { return reinterpret_cast<char*>(address) + 1; };
  const auto refused = [&](void* target, const void* source, double* block_sums, std::int64_t numel) {
    return CHECK_THROWS(std::invalid_argument, optim::arrive(pool, Arrival::kAdd, target, Dtype::kFloat32,
                                                             source, Dtype::kFloat32, numel, block_sums));
  };
  const auto starts = [](const std::string& text, const std::string& start) { return text.find(start) == 0; };
  CHECK(starts(refused(spoiled(data.data()), data.data() + 4, sums.data(), 1),
               "target: expected an address on a multiple of 4 bytes"));
  CHECK(starts(refused(data.data(), nullptr, sums.data(), 1), "source: expected"));
  CHECK(starts(refused(data.data(), data.data() + 4, reinterpret_cast<double*>(spoiled(sums.data())), 1),
               "sums: "));
  CHECK(starts(refused(data.data(), data.data() + 4, sums.data(), -1), "numel: "));
  for (const Dtype target : {Dtype::kBfloat16, Dtype::kFloat16}) {
    for (const Dtype source : states::kDtypes) {
      if (source == target) continue;
      for (const Arrival arrival : {Arrival::kAdd, Arrival::kReplace}) {
        const std::string message = CHECK_THROWS(
            std::invalid_argument,
            optim::arrive(pool, arrival, data.data(), target, data.data() + 4, source, 1, sums.data()));
        CHECK_EQUAL(message, "source: expected the target's type, or a float32 target");
      }
    }
  }
  CHECK(starts(
      CHECK_THROWS(std::invalid_argument, optim::square_sums(pool, nullptr, Dtype::kFloat16, 1, sums.data())),
      "grad: expected an address on a multiple of 2 bytes, got 0"));
  optim::arrive(pool, Arrival::kReplace, nullptr, Dtype::kFloat32, nullptr, Dtype::kFloat32, 0, nullptr);
  optim::square_sums(pool, nullptr, Dtype::kFloat32, 0, nullptr);
}
