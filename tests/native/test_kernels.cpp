// Against a reference that is written once more, one element at a time: results must be equal to the bit.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "check.hpp"
#include "cpu/target.hpp"
#include "optim/adamw.hpp"
#include "optim/gradients.hpp"
#include "optim/master_weights.hpp"

using namespace zerooffload;

namespace {

constexpr optim::AdamWScalars kScalars{0.37f, 0.999f, 0.9f, 0.1f, 0.99f, 0.01f, 0.2f, 1e-8f, 1e-3f};

std::vector<float> random_floats(std::int64_t numel, unsigned seed, float low, float high) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> draw(low, high);
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (float& value : values) value = draw(generator);
  return values;
}

std::uint16_t upper_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

float from_upper_half(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct State {
  std::vector<float> param, exp_avg, exp_avg_sq;

  explicit State(std::int64_t numel)
      : param(random_floats(numel, 1, -1, 1)),
        exp_avg(random_floats(numel, 2, -0.1f, 0.1f)),
        exp_avg_sq(random_floats(numel, 3, 0, 0.01f)) {}
  optim::AdamWFp32Arrays arrays(const void* grad) {
    return {param.data(), exp_avg.data(), exp_avg_sq.data(), grad};
  }
};

// volatile: each operation is rounded to float on its own, whatever the compiler would like to contract.
void reference_step(State& state, const std::vector<float>& grad, const optim::AdamWScalars& k) {
  for (std::size_t i = 0; i < grad.size(); ++i) {
    volatile float g = grad[i] * k.grad_factor;
    volatile float p = state.param[i] * k.decay;
    volatile float kept_m = k.beta1 * state.exp_avg[i], new_m = k.one_minus_beta1 * g;
    volatile float square = g * g;
    volatile float kept_v = k.beta2 * state.exp_avg_sq[i], new_v = k.one_minus_beta2 * square;
    volatile float m = kept_m + new_m, v = kept_v + new_v;
    volatile float root = std::sqrt(v);
    volatile float scaled = root / k.bias2_sqrt;
    volatile float d = scaled + k.eps;
    volatile float ratio = m / d;
    volatile float change = k.step_size * ratio;
    state.param[i] = p - change;
    state.exp_avg[i] = m;
    state.exp_avg_sq[i] = v;
  }
}

template <typename Body>
void for_each_setting(Body&& body) {
  for (const cpu::Target target : cpu::supported_targets()) {
    cpu::set_target(cpu::target_name(target));
    for (int num_threads = 1; num_threads <= 4; ++num_threads) {
      ThreadPool pool(num_threads);
      body(pool);
    }
  }
}

constexpr std::int64_t kLengths[] = {0, 1, 7, 33, 4095, 4097, 40 * 4096 + 5, 200 * 4096 + 3};

}  // namespace

TEST(adamw_fp32_equals_the_reference) {
  for_each_setting([](ThreadPool& pool) {
    for (const std::int64_t numel : kLengths) {
      const std::vector<float> grad = random_floats(numel, 4, -1, 1);
      State expected(numel), got(numel);
      reference_step(expected, grad, kScalars);
      optim::adamw_fp32(pool, got.arrays(grad.data()), Dtype::kFloat32, numel, kScalars);
      CHECK(same_bits(expected.param, got.param));
      CHECK(same_bits(expected.exp_avg, got.exp_avg));
      CHECK(same_bits(expected.exp_avg_sq, got.exp_avg_sq));
    }
  });
}

TEST(adamw_bf16_equals_the_split_reference) {
  for_each_setting([](ThreadPool& pool) {
    for (const std::int64_t numel : kLengths) {
      const auto count = static_cast<std::size_t>(numel);
      std::vector<float> grad = random_floats(numel, 4, -1, 1);
      std::vector<std::uint16_t> grad_halves(count), param(count);
      std::vector<std::int16_t> remainder(count);
      for (std::size_t i = 0; i < count; ++i) {
        grad_halves[i] = upper_half(grad[i]);
        grad[i] = from_upper_half(grad_halves[i]);
      }
      State expected(numel), got(numel);
      optim::split_fp32(pool, got.param.data(), param.data(), remainder.data(), numel);
      reference_step(expected, grad, kScalars);
      const optim::AdamWBf16Arrays arrays{param.data(), remainder.data(), got.exp_avg.data(),
                                          got.exp_avg_sq.data(), grad_halves.data()};
      optim::adamw_bf16(pool, arrays, Dtype::kBfloat16, numel, kScalars);
      optim::join_fp32(pool, param.data(), remainder.data(), got.param.data(), numel);
      CHECK(same_bits(expected.param, got.param));
      CHECK(same_bits(expected.exp_avg, got.exp_avg));
      CHECK(same_bits(expected.exp_avg_sq, got.exp_avg_sq));
    }
  });
}

TEST(split_and_join_are_inverse_for_special_values) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> source{0.f,
                                  -0.f,
                                  1.f,
                                  -1.f,
                                  inf,
                                  -inf,
                                  nan,
                                  std::numeric_limits<float>::max(),
                                  std::numeric_limits<float>::lowest(),
                                  std::numeric_limits<float>::denorm_min(),
                                  1e-40f};
  for_each_setting([&](ThreadPool& pool) {
    std::vector<std::uint16_t> param(source.size());
    std::vector<std::int16_t> remainder(source.size());
    std::vector<float> back(source.size());
    const auto numel = static_cast<std::int64_t>(source.size());
    optim::split_fp32(pool, source.data(), param.data(), remainder.data(), numel);
    optim::join_fp32(pool, param.data(), remainder.data(), back.data(), numel);
    CHECK(same_bits(source, back));
  });
}

TEST(square_sums_follow_the_documented_order) {
  for_each_setting([](ThreadPool& pool) {
    for (const std::int64_t numel : kLengths) {
      const std::vector<float> grad = random_floats(numel, 5, -3, 3);
      const auto num_blocks = static_cast<std::size_t>((numel + 4095) / 4096);
      std::vector<double> got(num_blocks, -1.0), expected;
      for (std::size_t block = 0; block < num_blocks; ++block) {
        double lanes[16] = {};
        for (std::size_t i = block * 4096; i < (block + 1) * 4096 && i < grad.size(); ++i) {
          lanes[i % 16] += double{grad[i]} * double{grad[i]};
        }
        for (int width = 8; width >= 1; width /= 2) {
          for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
        }
        expected.push_back(lanes[0]);
      }
      optim::square_sums(pool, grad.data(), Dtype::kFloat32, numel, got.data());
      CHECK(same_bits(expected, got));
    }
  });
}

TEST(accumulate_rounds_ties_to_even) {
  // 1 + 2^-8 lies half way between two bfloat16; so does 1 + 3 * 2^-8: one rounds down, the other up.
  std::vector<std::uint16_t> target{upper_half(1.f), upper_half(1.f + 1.f / 128)};
  const std::vector<std::uint16_t> source{upper_half(1.f / 256), upper_half(1.f / 256)};
  ThreadPool pool(1);
  optim::accumulate(pool, target.data(), source.data(), Dtype::kBfloat16, 2);
  CHECK_EQUAL(from_upper_half(target[0]), 1.f);
  CHECK_EQUAL(from_upper_half(target[1]), 1.f + 2.f / 128);
}

TEST(kernels_refuse_bad_arguments) {
  ThreadPool pool(1);
  std::vector<float> data(8);
  auto* const odd = reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(data.data()) + 1);
  const std::string misaligned =
      CHECK_THROWS(std::invalid_argument, optim::accumulate(pool, odd, data.data(), Dtype::kFloat32, 1));
  CHECK(misaligned.find("target: expected an address on a multiple of 4 bytes") == 0);
  CHECK_THROWS(std::invalid_argument, optim::accumulate(pool, data.data(), nullptr, Dtype::kFloat32, 1));
  CHECK_THROWS(std::invalid_argument, optim::accumulate(pool, data.data(), data.data(), Dtype::kFloat32, -1));
  optim::accumulate(pool, nullptr, nullptr, Dtype::kFloat32, 0);
}
