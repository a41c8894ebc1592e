// To and from 16 bits, exhaustively, and every 8-bit code at every scale.

#include <cmath>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "optim/launch.hpp"
#include "optim/step.hpp"
#include "scalar_reference.hpp"
#include "settings.hpp"
#include "states.hpp"

using namespace zerooffload;
using optim::MomentFormat;
using optim::Rule;
using states::State;

namespace {

std::vector<std::uint16_t> all_16_bits() {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

// Every number of 16 bits, every tie between two neighbours and the floats beside it, and floats at a stride
// that meets every exponent with all kinds of mantissas.
template <typename FromBits>
std::vector<std::uint32_t> floats_that_matter(FromBits&& from_bits) {
  std::vector<std::uint32_t> all;
  for (int i = 0; i < 65536; ++i) {
    const float value = from_bits(static_cast<std::uint16_t>(i));
    all.push_back(reference::bits_of(value));
    // Above 65504 the next half would be 65536, were it not infinity.
    const float next = i == 0x7BFF || i == 0xFBFF ? std::copysign(65536.0f, value)
                                                  : from_bits(static_cast<std::uint16_t>(i + 1));
    const auto tie = static_cast<float>((static_cast<double>(value) + static_cast<double>(next)) / 2);
    if (!std::isfinite(tie)) continue;
    for (const std::uint32_t beside : {0xFFFFFFFFu, 0u, 1u}) all.push_back(reference::bits_of(tie) + beside);
  }
  for (std::uint64_t bits = 0; bits < 0x100000000u; bits += 0x1FC3)
    all.push_back(static_cast<std::uint32_t>(bits));
  return all;
}

void check_widening(Dtype dtype, float (*expected)(std::uint16_t)) {
  const std::vector<std::uint16_t> all = all_16_bits();
  for_each_target({1}, [&](ThreadPool&) {
    const auto widen = optim::active_kernels().widen[static_cast<int>(dtype)];
    for (const std::size_t head : {0, 1, 5}) {
      std::vector<float> got(all.size() - head);
      widen(all.data() + head, got.data(), static_cast<std::int64_t>(got.size()));
      for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK_EQUAL(reference::bits_of(got[i]), reference::bits_of(expected(all[head + i])));
      }
    }
  });
}

void check_narrowing(Dtype dtype, float (*from_bits)(std::uint16_t), std::uint16_t (*expected)(float)) {
  std::vector<float> floats;
  for (const std::uint32_t bits : floats_that_matter(from_bits)) floats.push_back(reference::float_of(bits));
  std::vector<std::uint16_t> rounded;
  for (const float value : floats) rounded.push_back(expected(value));
  for_each_target({1}, [&](ThreadPool&) {
    const auto narrow = optim::active_kernels().narrow[static_cast<int>(dtype)];
    for (const std::size_t head : {0, 3}) {
      std::vector<std::uint16_t> got(floats.size() - head);
      narrow(floats.data() + head, got.data(), static_cast<std::int64_t>(got.size()));
      for (std::size_t i = 0; i < got.size(); ++i) CHECK_EQUAL(got[i], rounded[head + i]);
      // In pieces so short that they go through the ends of loops.
      for (std::size_t i = 0; i + 7 < got.size(); i += 2047) {
        narrow(floats.data() + head + i, got.data(), 7);
        for (std::size_t j = 0; j < 7; ++j) CHECK_EQUAL(got[j], rounded[head + i + j]);
      }
    }
  });
}

// 256 elements with every code, for each exponent of their two blocks' scale.
State every_code_at_every_scale(Rule rule, int which) {
  State state =
      states::make_state({rule, Dtype::kFloat32, Dtype::kFloat32, MomentFormat::kBlock8}, 256 * 256, 3);
  for (std::int64_t i = 0; i < state.numel; ++i) {
    state.moments[which].set(i, static_cast<std::uint8_t>(i % 256));
    state.exponents[which].set(i / optim::kScaleBlockNumel, static_cast<std::uint8_t>(i / 256));
    state.param.set(i, 0.0f);
    state.grad.set(i, 1e-30f);  // whose square is 0
  }
  return state;
}

}  // namespace

TEST(fp16_widens_all_halves) { check_widening(Dtype::kFloat16, reference::from_half); }
TEST(bf16_widens_all_upper_halves) { check_widening(Dtype::kBfloat16, reference::from_bf16); }
TEST(fp16_narrows_to_nearest) { check_narrowing(Dtype::kFloat16, reference::from_half, reference::to_half); }
TEST(bf16_narrows_to_nearest) {
  check_narrowing(Dtype::kBfloat16, reference::from_bf16,
                  [](float value) { return reference::to_bf16(value); });
}

TEST(fp16_rounds_to_infinity_from_65520_on) {
  CHECK_EQUAL(reference::to_half(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  CHECK_EQUAL(reference::to_half(65520.0f), 0x7C00);
  CHECK_EQUAL(reference::to_half(-65520.0f), 0xFC00);
  CHECK_EQUAL(reference::to_half(0x1p-25f), 0);
  CHECK_EQUAL(reference::to_half(std::nextafter(0x1p-25f, 1.0f)), 1);
}

TEST(every_8_bit_code_is_read_and_written_at_every_scale) {
  const struct {
    Rule rule;
    int which;
  } kinds[] = {{Rule::kSgd, 0}, {Rule::kLion, 0}, {Rule::kAdagrad, 0}, {Rule::kAdamW, 0}, {Rule::kAdamW, 1}};
  for (const auto& kind : kinds) {
    const State start = every_code_at_every_scale(kind.rule, kind.which);
    const std::vector<float> scalars = states::scalars_of(kind.rule);
    State expected = start;
    states::reference_step(expected, scalars, 0, 5);
    for_each_target({1}, [&](ThreadPool& pool) {
      State got = start;
      optim::step(pool, kind.rule, states::step_arrays(got), got.numel, scalars.data(), 0, 5);
      CHECK(states::same(expected, got));
    });
  }
}

TEST(the_8_bit_reference_reads_back_what_it_wrote) {
  for (const bool non_negative : {false, true}) {
    for (const int exponent : {1, 2, 127, 253, 254}) {
      for (int code = 0; code < 256; ++code) {
        const auto byte = static_cast<std::uint8_t>(code);
        const float value = reference::decode(byte, exponent, {non_negative});
        if (exponent < 60 && std::fabs(value) < 0x1p-120f) continue;  // a denormal was rounded
        CHECK_EQUAL(reference::encode(value, exponent, {non_negative}, reference::kNearest), byte);
        CHECK_EQUAL(reference::encode(value, exponent, {non_negative}, 0), byte);
        CHECK_EQUAL(reference::encode(value, exponent, {non_negative}, 0xFFFF), byte);
      }
    }
  }
}
