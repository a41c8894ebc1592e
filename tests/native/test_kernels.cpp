// Steps and master weights against the scalar reference: equal to the bit.

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.hpp"
#include "check.hpp"
#include "cpu/target.hpp"
#include "optim/master_weights.hpp"
#include "optim/step.hpp"
#include "optim/traffic.hpp"
#include "scalar_reference.hpp"
#include "settings.hpp"
#include "states.hpp"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

using namespace zerooffload;
using optim::kScaleBlockNumel;
using optim::MomentFormat;
using optim::Rule;
using states::Format;
using states::State;

namespace {

constexpr std::uint32_t kSeed = 0x9ABCDEF1u;

void step(ThreadPool& pool, State& state, const std::vector<float>& scalars, std::int64_t first_index = 0,
          std::int64_t begin = 0, std::int64_t end = -1) {
  optim::step(pool, state.format.rule, states::step_arrays(state, begin),
              (end < 0 ? state.numel : end) - begin, scalars.data(), first_index + begin, kSeed);
}

void check_same(const State& expected, const State& got, const std::string& when = "") {
  if (!states::same(expected, got)) {
    check::fail(__FILE__, __LINE__,
                states::name_of(got.format) + ", " + std::to_string(got.numel) + " elements, " +
                    cpu::target_name(cpu::active_target()) + " " + when);
  }
}

// Each rule and format of moments once, the parameters' and the gradients' type in turn.
std::vector<Format> some_formats() {
  std::vector<Format> formats;
  for (const Rule rule : states::kRules) {
    for (const MomentFormat moments : states::kMomentFormats) {
      const std::size_t turn = formats.size();
      formats.push_back({rule, states::kDtypes[turn % 3], states::kDtypes[(turn / 3 + turn) % 3], moments});
    }
  }
  return formats;
}

// Two steps, so that what one leaves is what the next one finds.
void check_two_steps(const Format& format, std::int64_t numel, std::int64_t head,
                     const std::vector<float>& scalars, std::int64_t first_index = 0) {
  const State start = states::make_state(format, numel, 1 + static_cast<std::uint64_t>(numel), head);
  State expected = start;
  for (int i = 0; i < 2; ++i) states::reference_step(expected, scalars, first_index, kSeed);
  for_each_target({1}, [&](ThreadPool& pool) {
    State got = start;
    for (int i = 0; i < 2; ++i) step(pool, got, scalars, first_index);
    check_same(expected, got);
  });
}

}  // namespace

TEST(step_equals_the_reference_in_every_format_and_length) {
  for (const Format& format : states::all_formats()) {
    for (const std::int64_t numel : {0, 1, 2, 127, 128, 129, 1023, 1024, 1025, 4096 + 77}) {
      check_two_steps(format, numel, 0, states::scalars_of(format.rule));
    }
  }
}

TEST(step_equals_the_reference_from_any_head) {
  const std::vector<Format> formats = states::all_formats();
  for (std::size_t i = 0; i < formats.size(); ++i) {
    check_two_steps(formats[i], 300, 1 + static_cast<std::int64_t>(i % 17),
                    states::scalars_of(formats[i].rule));
  }
}

TEST(step_equals_the_reference_with_special_scalars) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Format& format : some_formats()) {
    for (const float grad_factor : {0.0f, -1.0f, 1e-38f, 1e30f, inf, nan}) {
      std::vector<float> scalars = states::scalars_of(format.rule);
      scalars[0] = grad_factor;
      check_two_steps(format, 6 * kScaleBlockNumel, 0, scalars);
    }
    // eps of 0, or whatever stands last but one: a second moment of 0 then divides by 0.
    std::vector<float> scalars = states::scalars_of(format.rule);
    scalars[scalars.size() - 2] = 0.0f;
    check_two_steps(format, 6 * kScaleBlockNumel, 0, scalars);
  }
}

TEST(step_equals_the_reference_whatever_the_scales_of_8_bit_blocks) {
  constexpr std::int64_t kNumBlocks = 254;
  for (const Rule rule : states::kRules) {
    State start = states::make_state({rule, Dtype::kFloat32, Dtype::kFloat32, MomentFormat::kBlock8},
                                     kNumBlocks * kScaleBlockNumel, 41);
    // Each exponent of a moment once, the gradients' in another order: blocks keep, gain and lose scales.
    states::Numbers numbers(43);
    for (std::int64_t i = 0; i < start.numel; ++i) {
      const int exponent = static_cast<int>(i / kScaleBlockNumel * 53 % 254) - 126;
      start.grad.set(i, numbers.number(exponent - 3, exponent));
    }
    for (int which = 0; which < reference::num_moments(rule); ++which) {
      std::vector<float> values;
      for (std::int64_t i = 0; i < start.numel; ++i) {
        const int exponent = static_cast<int>(i / kScaleBlockNumel) - 126;
        const float value = numbers.number(exponent - 3, exponent);
        values.push_back(reference::is_non_negative(rule, which) ? std::fabs(value) : value);
      }
      states::set_moments(start, which, values, 0, nullptr);
    }
    State expected = start;
    states::reference_step(expected, states::scalars_of(rule), 0, kSeed);
    for_each_target({1}, [&](ThreadPool& pool) {
      State got = start;
      step(pool, got, states::scalars_of(rule));
      check_same(expected, got);
    });
  }
}

TEST(step_takes_any_first_index) {
  for (const Format& format : some_formats()) {
    for (const std::int64_t first_index : {128LL, 0xFFFFFF80LL, 0x100000000LL, 0x7FFFFFFF00000080LL}) {
      check_two_steps(format, 1500, 0, states::scalars_of(format.rule), first_index);
    }
  }
}

TEST(step_gives_the_same_bits_with_any_number_of_threads) {
  const std::vector<Format> formats = some_formats();
  for (std::size_t i = 0; i < formats.size(); i += 2) {
    const Format& format = formats[i];
    const State start = states::make_state(format, 66 * optim::kBlockNumel + 5, 7);
    const std::vector<float> scalars = states::scalars_of(format.rule);
    State expected = start;
    cpu::set_target("baseline");
    ThreadPool one(1);
    step(one, expected, scalars);
    for_each_target({2, 3, 4}, [&](ThreadPool& pool) {
      State got = start;
      step(pool, got, scalars);
      check_same(expected, got, std::to_string(pool.num_threads()) + " threads");
    });
  }
}

TEST(step_gives_the_same_bits_however_it_is_cut) {
  const std::int64_t cuts[] = {0, 128, 384, 4096, 4096 + 128, 32 * 4096 + 128, 33 * 4096, 33 * 4096 + 1000};
  for (const Format& format : some_formats()) {
    const State start = states::make_state(format, cuts[7], 11);
    const std::vector<float> scalars = states::scalars_of(format.rule);
    State expected = start;
    cpu::set_target("baseline");
    ThreadPool one(1);
    step(one, expected, scalars, 1 << 20);
    for_each_target({1, 2}, [&](ThreadPool& pool) {
      State got = start;
      for (int i = 0; i < 7; ++i) step(pool, got, scalars, 1 << 20, cuts[i], cuts[i + 1]);
      check_same(expected, got, "cut");
    });
  }
}

namespace {

// A state's arrays but the gradient's, and room for as many as far behind them.
class TwoPlaces {
 public:
  TwoPlaces(State& state, std::int64_t head) {
    for (states::Array* array : state.arrays()) {
      if (array == &state.grad || array->numel == 0) continue;
      const auto item = static_cast<std::size_t>(states::kind_bytes(array->kind));
      const std::size_t nbytes = static_cast<std::size_t>(array->numel) * item;
      places_.push_back({array, stride_ + static_cast<std::size_t>(head) * item, nbytes});
      stride_ += (static_cast<std::size_t>(head) * item + nbytes + 127) / 64 * 64;
    }
    bytes_.resize(2 * stride_ + 64, 0xEE);
    for (const Place& place : places_) std::memcpy(old() + place.offset, place.array->data(), place.nbytes);
  }

  std::ptrdiff_t origin() const { return -static_cast<std::ptrdiff_t>(stride_); }

  // Where the new values of an array of the state belong.
  void* home(const states::Array& array) {
    for (const Place& place : places_) {
      if (place.array == &array) return old() + stride_ + place.offset;
    }
    return nullptr;
  }

  // Lets the state be what stands in the second place; false if the first one changed.
  bool take() {
    for (const Place& place : places_) {
      if (std::memcmp(old() + place.offset, place.array->data(), place.nbytes) != 0) return false;
    }
    for (const Place& place : places_) {
      std::memcpy(place.array->data(), old() + stride_ + place.offset, place.nbytes);
    }
    return true;
  }

 private:
  struct Place {
    states::Array* array;
    std::size_t offset, nbytes;
  };

  unsigned char* old() {
    const auto past_line = reinterpret_cast<std::uintptr_t>(bytes_.data()) % 64;
    return bytes_.data() + (64 - past_line) % 64;
  }

  std::vector<unsigned char> bytes_;
  std::vector<Place> places_;
  std::size_t stride_ = 0;
};

// A step that reads one place and writes another leaves the bits of one in place.
void check_beside(const Format& format, std::int64_t numel, std::int64_t head) {
  const std::vector<float> scalars = states::scalars_of(format.rule);
  const State start = states::make_state(format, numel, 47);
  State expected = start;
  states::reference_step(expected, scalars, 0, kSeed);
  for_each_target({2}, [&](ThreadPool& pool) {
    State got = start;
    TwoPlaces places(got, head);
    optim::StepArrays arrays = states::step_arrays(got);
    arrays.param = places.home(got.param);
    if (arrays.companion != nullptr) arrays.companion = places.home(got.companion);
    for (int which = 0; which < reference::num_moments(format.rule); ++which) {
      arrays.moments.values[which] = places.home(got.moments[which]);
      if (arrays.moments.exponents[which] == nullptr) continue;
      arrays.moments.exponents[which] = static_cast<std::uint8_t*>(places.home(got.exponents[which]));
    }
    arrays.param_origin = arrays.record_origin = places.origin();
    optim::step(pool, format.rule, arrays, numel, scalars.data(), 0, kSeed);
    CHECK(places.take());
    check_same(expected, got, "beside");
  });
}

}  // namespace

TEST(step_beside_the_old_values_gives_the_bits_of_one_in_place) {
  for (const Format& format : states::all_formats()) {
    for (const auto& [numel, head] : {std::pair{1, 0}, {127, 0}, {1000, 0}, {640, 16}}) {
      check_beside(format, numel, head);
    }
  }
}

TEST(step_beside_the_old_values_is_divided_among_threads) {
  for (const Format& format : some_formats()) check_beside(format, 4096 * 33 + 5, 3);
}

TEST(step_cuts_float_and_bf16_moments_anywhere) {
  for (const Format& format : some_formats()) {
    if (format.moments == MomentFormat::kBlock8) continue;
    const State start = states::make_state(format, 3000, 13);
    const std::vector<float> scalars = states::scalars_of(format.rule);
    State expected = start;
    states::reference_step(expected, scalars, 5, kSeed);
    for_each_target({1}, [&](ThreadPool& pool) {
      State got = start;
      for (const std::int64_t begin : {0, 1, 38, 1063}) {
        step(pool, got, scalars, 5, begin, begin == 0 ? 1 : begin == 1 ? 38 : begin == 38 ? 1063 : 3000);
      }
      check_same(expected, got, "cut");
    });
  }
}

#if defined(__SSE__) || defined(__aarch64__)
namespace {

// The control register of floating point: what flushes denormals to zero is one bit of it (two on x86).
#if defined(__SSE__)
std::uint64_t float_mode() { return _mm_getcsr(); }
void set_float_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
constexpr std::uint64_t kFlush = 0x8040;
#else
std::uint64_t float_mode() {
  std::uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(std::uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
constexpr std::uint64_t kFlush = 1u << 24;
#endif

}  // namespace

TEST(step_keeps_denormals_whatever_the_thread_says) {
  for (const Format& format : some_formats()) {
    const State start = states::make_state(format, 6 * kScaleBlockNumel, 37);
    const std::vector<float> scalars = states::scalars_of(format.rule);
    State expected = start;
    states::reference_step(expected, scalars, 0, kSeed);
    for_each_target({1}, [&](ThreadPool& pool) {
      State got = start;
      const std::uint64_t before = float_mode();
      set_float_mode(before | kFlush);
      step(pool, got, scalars);
      const std::uint64_t after = float_mode();
      set_float_mode(before);
      CHECK((after & kFlush) == kFlush);
      check_same(expected, got, "flushing");
    });
  }
}
#endif

TEST(an_8_bit_second_moment_above_zero_never_becomes_zero) {
  for (const Rule rule : {Rule::kAdamW, Rule::kAdam, Rule::kAdagrad}) {
    State start =
        states::make_state({rule, Dtype::kFloat32, Dtype::kFloat32, MomentFormat::kBlock8}, 1280, 17);
    const int which = reference::num_moments(rule) - 1;
    // In one block from 0 over the smallest denormal to the largest number, 2^-149 to 2^127.
    std::vector<float> values;
    for (std::int64_t i = 0; i < start.numel; ++i) {
      values.push_back(i % 10 == 0 ? 0.0f : std::ldexp(1.0f, static_cast<int>(i * 31 % 277) - 149));
      start.grad.set(i, 0.0f);
      start.param.set(i, 0.0f);
    }
    for (int other = 0; other < which; ++other)
      states::set_moments(start, other, std::vector<float>(1280), 0, nullptr);
    states::set_moments(start, which, values, 0, nullptr);
    std::vector<float> scalars = states::scalars_of(rule);
    scalars[1] = 0.0f;  // no weight decay, so that the moment stays
    scalars[rule == Rule::kAdagrad ? 2 : 4] = rule == Rule::kAdagrad ? 0.0f : 1.0f;
    for_each_target({1}, [&](ThreadPool& pool) {
      State got = start;
      for (int i = 0; i < 5; ++i) step(pool, got, scalars);
      for (std::int64_t i = 0; i < got.numel; ++i) {
        const int code = got.moments[which].get<std::uint8_t>(i);
        CHECK_EQUAL(code == 0, values[static_cast<std::size_t>(i)] == 0.0f);
      }
    });
  }
}

TEST(an_8_bit_block_with_a_nan_or_infinity_becomes_nan_and_no_other) {
  for (const Rule rule : states::kRules) {
    for (const float wrong :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      State start =
          states::make_state({rule, Dtype::kFloat32, Dtype::kFloat32, MomentFormat::kBlock8}, 500, 19);
      for (int which = 0; which < reference::num_moments(rule); ++which) {
        states::set_moments(start, which, std::vector<float>(500, 0.25f), 0, nullptr);
      }
      for (std::int64_t i = 0; i < 500; ++i) {
        start.param.set(i, 0.5f);
        start.grad.set(i, i == 200 ? wrong : 0.125f);
      }
      for_each_target({1}, [&](ThreadPool& pool) {
        State got = start;
        step(pool, got, states::scalars_of(rule));
        for (int which = 0; which < reference::num_moments(rule); ++which) {
          for (std::int64_t i = 0; i < 500; ++i) {
            CHECK_EQUAL(std::isnan(states::moment(got, which, i)), i / kScaleBlockNumel == 1);
          }
        }
        for (std::int64_t i = 0; i < 500; ++i) {
          CHECK(std::isfinite(got.param.get<float>(i)) || i == 200);
        }
        step(pool, got, states::scalars_of(rule));
        for (std::int64_t i = 0; i < 500; ++i) {
          CHECK_EQUAL(std::isnan(got.param.get<float>(i)), i / kScaleBlockNumel == 1);
        }
      });
    }
  }
}

TEST(split_and_join_are_inverse_for_special_values) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> source{0.f, -0.f, 1.f, -1.f, inf, -inf, nan, 1e-40f};
  source.push_back(std::numeric_limits<float>::max());
  source.push_back(std::numeric_limits<float>::lowest());
  source.push_back(std::numeric_limits<float>::denorm_min());
  states::Numbers numbers(23);
  while (source.size() < 1000) source.push_back(numbers.number(-149, 127));
  const auto numel = static_cast<std::int64_t>(source.size());
  for_each_target({1}, [&](ThreadPool& pool) {
    std::vector<std::uint16_t> param(source.size());
    std::vector<std::int16_t> remainder(source.size());
    std::vector<float> back(source.size());
    optim::split_fp32(pool, source.data(), param.data(), remainder.data(), numel);
    optim::join_fp32(pool, param.data(), remainder.data(), back.data(), numel);
    CHECK(std::memcmp(source.data(), back.data(), source.size() * sizeof(float)) == 0);
  });
}

TEST(move_traffic_changes_nothing) {
  for_each_target({1, 2}, [](ThreadPool& pool) {
    constexpr std::int64_t kNumel = 34 * 4096 + 5 * 1024;
    std::vector<std::uint64_t> wide(kNumel / 2), narrow(kNumel / 8);
    states::Numbers numbers(29);
    for (std::uint64_t& word : wide) word = std::uint64_t{numbers.bits()} << 32 | numbers.bits();
    for (std::uint64_t& word : narrow) word = std::uint64_t{numbers.bits()} << 32 | numbers.bits();
    const std::vector<std::uint64_t> before_wide = wide, before_narrow = narrow;
    for (const bool written : {true, false}) {
      optim::move_traffic(pool, {{wide.data(), 4, written}, {narrow.data(), 1, !written}}, kNumel);
      CHECK(wide == before_wide);
      CHECK(narrow == before_narrow);
    }
    optim::move_traffic(pool, {{wide.data(), 4, true}}, 1023);
    optim::move_traffic(pool, {{nullptr, 4, true}}, 0);
    CHECK_THROWS(std::invalid_argument, optim::move_traffic(pool, {{nullptr, 4, true}}, 1024));
  });
}

namespace {

// The message about the one argument that `change` spoils.
template <typename Change>
std::string refusal(const Format& format, Change&& change, std::int64_t numel = 8) {
  ThreadPool pool(1);
  State state = states::make_state(format, 8, 31);
  optim::StepArrays arrays = states::step_arrays(state);
  change(arrays);
  const std::vector<float> scalars = states::scalars_of(format.rule);
  return CHECK_THROWS(std::invalid_argument,
                      optim::step(pool, format.rule, arrays, numel, scalars.data(), 0, kSeed));
}

template <typename T>
T* odd(T* address) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(address) + 1);
}
void* odd(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(address) + 1);
}

}  // namespace

TEST(step_refuses_bad_arguments_by_name) {
  using Arrays = optim::StepArrays;
  const Format plain{Rule::kAdamW, Dtype::kFloat32, Dtype::kFloat32, MomentFormat::kFloat32};
  const Format small{Rule::kAdam, Dtype::kBfloat16, Dtype::kFloat16, MomentFormat::kBlock8};
  const Format half{Rule::kSgd, Dtype::kFloat16, Dtype::kBfloat16, MomentFormat::kBfloat16};
  const std::string by4 = ": expected an address on a multiple of 4 bytes, got ";
  const std::string by2 = ": expected an address on a multiple of 2 bytes, got ";
  const std::string by1 = ": expected an address on a multiple of 1 bytes, got 0";
  const auto starts = [](const std::string& text, const std::string& start) { return text.find(start) == 0; };

  CHECK(starts(refusal(plain, [](Arrays& a) { a.param = nullptr; }), "param" + by4 + "0"));
  CHECK(starts(refusal(plain, [](Arrays& a) { a.param = odd(a.param); }), "param" + by4));
  CHECK(starts(refusal(plain, [](Arrays& a) { a.grad = odd(a.grad); }), "grad" + by4));
  CHECK(starts(refusal(plain, [](Arrays& a) { a.moments.values[1] = odd(a.moments.values[1]); }),
               "moment" + by4));
  CHECK(starts(refusal(small, [](Arrays& a) { a.param = odd(a.param); }), "param" + by2));
  CHECK(starts(refusal(small, [](Arrays& a) { a.companion = nullptr; }), "companion" + by2 + "0"));
  CHECK(starts(refusal(small, [](Arrays& a) { a.grad = odd(a.grad); }), "grad" + by2));
  CHECK(starts(refusal(small, [](Arrays& a) { a.moments.values[0] = nullptr; }), "moment" + by1));
  CHECK(starts(refusal(small, [](Arrays& a) { a.moments.exponents[1] = nullptr; }), "exponents" + by1));
  CHECK(starts(refusal(half, [](Arrays& a) { a.companion = odd(a.companion); }), "companion" + by4));
  CHECK(starts(refusal(half, [](Arrays& a) { a.moments.values[0] = odd(a.moments.values[0]); }),
               "moment" + by2));
  CHECK_EQUAL(refusal(plain, [](Arrays&) {}, -1), "numel: expected 0 or more, got -1");

  ThreadPool pool(1);
  const std::vector<float> scalars = states::scalars_of(Rule::kAdamW);
  optim::step(pool, Rule::kAdamW, {}, 0, scalars.data(), 0, 0);
}

TEST(master_weights_refuse_bad_arguments_by_name) {
  ThreadPool pool(1);
  float source[2] = {};
  std::uint16_t param[2] = {};
  std::int16_t remainder[2] = {};
  const auto names = [](const std::string& text, const std::string& name) {
    return text.find(name + ":") == 0;
  };
  CHECK(names(CHECK_THROWS(std::invalid_argument, optim::split_fp32(pool, odd(source), param, remainder, 1)),
              "source"));
  CHECK(names(CHECK_THROWS(std::invalid_argument, optim::split_fp32(pool, source, nullptr, remainder, 1)),
              "param"));
  CHECK(names(CHECK_THROWS(std::invalid_argument, optim::join_fp32(pool, param, odd(remainder), source, 1)),
              "remainder"));
  CHECK(names(CHECK_THROWS(std::invalid_argument, optim::join_fp32(pool, param, remainder, nullptr, 1)),
              "target"));
  CHECK(names(CHECK_THROWS(std::invalid_argument, optim::join_fp32(pool, param, remainder, source, -1)),
              "numel"));
}
