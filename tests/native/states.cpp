#include "states.hpp"

#include <algorithm>
#include <cmath>

#include "scalar_reference.hpp"

namespace states {
namespace {

using zerooffload::optim::kScaleBlockNumel;

constexpr std::uint32_t kSpecialBits[] = {0x7F800000u, 0xFF800000u, 0x7FC00000u,
                                          0xFFFFFFFFu, 0x7F800001u, 0x80000000u};

enum class Flavour { kOrdinary, kZero, kDenormal, kLarge, kSpecial };
Flavour flavour_of(std::int64_t index) {
  constexpr Flavour kCycle[] = {Flavour::kOrdinary, Flavour::kZero,     Flavour::kLarge,
                                Flavour::kOrdinary, Flavour::kDenormal, Flavour::kSpecial};
  return kCycle[index / kScaleBlockNumel % 6];
}

// A number for an array whose ordinary ones have exponents in [low, high].
float draw(Numbers& numbers, Flavour flavour, int low, int high) {
  switch (flavour) {
    case Flavour::kZero:
      return (numbers.bits() & 1) != 0 ? 0.0f : -0.0f;
    case Flavour::kDenormal:
      return numbers.number(-149, -120);
    case Flavour::kLarge:
      return numbers.number(100, 127);
    case Flavour::kSpecial:
      if (numbers.bits() % 16 == 0) return reference::float_of(kSpecialBits[numbers.bits() % 6]);
      break;
    case Flavour::kOrdinary:
      break;
  }
  return numbers.number(low, high);
}

// Near the largest number the square of a gradient must not be what decides.
float draw_grad(Numbers& numbers, Flavour flavour) {
  if (flavour == Flavour::kLarge) return numbers.number(-20, 40);
  if (flavour == Flavour::kDenormal) return numbers.number(-149, -60);
  return draw(numbers, flavour, -12, 1);
}

}  // namespace

std::uint32_t Numbers::bits() {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  return static_cast<std::uint32_t>(state_ >> 32);
}

float Numbers::number(int low, int high) {
  const std::uint32_t mantissa = bits() & 0x007FFFFFu, other = bits();
  const int exponent = low + static_cast<int>((other >> 1) % static_cast<std::uint32_t>(high - low + 1));
  const std::uint32_t sign = other << 31;
  if (exponent >= -126) {
    return reference::float_of(sign | static_cast<std::uint32_t>(exponent + 127) << 23 | mantissa);
  }
  return reference::float_of(sign | (mantissa | 0x00800000u) >> (-126 - exponent));
}

int kind_bytes(Kind kind) { return kind == Kind::kFloat32 ? 4 : kind == Kind::kByte ? 1 : 2; }

Kind kind_of(Dtype dtype) {
  return dtype == Dtype::kFloat32    ? Kind::kFloat32
         : dtype == Dtype::kBfloat16 ? Kind::kBfloat16
                                     : Kind::kFloat16;
}

Array::Array(Kind kind_, std::int64_t numel_, std::int64_t head_)
    : kind(kind_),
      numel(numel_),
      head(head_),
      bytes(static_cast<std::size_t>((numel_ + head_) * kind_bytes(kind_)), 0xA5) {}

void* Array::at(std::int64_t index) { return bytes.data() + (head + index) * kind_bytes(kind); }

float Array::get_float(std::int64_t index) {
  if (kind == Kind::kFloat32) return get<float>(index);
  if (kind == Kind::kBfloat16) return reference::from_bf16(get<std::uint16_t>(index));
  return reference::from_half(get<std::uint16_t>(index));
}

void Array::set_float(std::int64_t index, float value) {
  if (kind == Kind::kFloat32) {
    set(index, value);
  } else {
    set(index, kind == Kind::kBfloat16 ? reference::to_bf16(value) : reference::to_half(value));
  }
}

void unite_nans(Array& array) {
  if (array.kind == Kind::kInt16 || array.kind == Kind::kByte) return;
  for (std::int64_t i = 0; i < array.numel; ++i) {
    if (!std::isnan(array.get_float(i))) continue;
    if (array.kind == Kind::kFloat32) array.set(i, std::uint32_t{0x7FC00000u});
    if (array.kind == Kind::kBfloat16) array.set(i, std::uint16_t{0x7FC0u});
    if (array.kind == Kind::kFloat16) array.set(i, std::uint16_t{0x7E00u});
  }
}

bool same_bits(const Array& a, const Array& b) {
  if (a.bytes == b.bytes) return true;
  Array one = a, other = b;
  unite_nans(one);
  unite_nans(other);
  return one.bytes == other.bytes;
}

std::string name_of(Rule rule) {
  constexpr const char* kNames[] = {"adamw", "adam", "adagrad", "lion", "sgd"};
  return kNames[static_cast<int>(rule)];
}
std::string name_of(Dtype dtype) {
  constexpr const char* kNames[] = {"fp32", "bf16", "fp16"};
  return kNames[static_cast<int>(dtype)];
}
std::string name_of(MomentFormat format) {
  constexpr const char* kNames[] = {"fp32", "bf16", "8bit"};
  return kNames[static_cast<int>(format)];
}
std::string name_of(const Format& format) {
  return name_of(format.rule) + ", parameters " + name_of(format.param) + ", gradients " +
         name_of(format.grad) + ", moments " + name_of(format.moments);
}

std::vector<Format> all_formats() {
  std::vector<Format> formats;
  for (const Rule rule : kRules) {
    for (const Dtype param : kDtypes) {
      for (const Dtype grad : kDtypes) {
        for (const MomentFormat moments : kMomentFormats) formats.push_back({rule, param, grad, moments});
      }
    }
  }
  return formats;
}

namespace {

Array new_companion(Dtype param, std::int64_t numel, std::int64_t head) {
  if (param == Dtype::kFloat32) return {};
  return Array(param == Dtype::kBfloat16 ? Kind::kInt16 : Kind::kFloat32, numel, head);
}

Kind moment_kind(MomentFormat format) {
  if (format == MomentFormat::kFloat32) return Kind::kFloat32;
  return format == MomentFormat::kBfloat16 ? Kind::kBfloat16 : Kind::kByte;
}

// bfloat16 and remainder: ties away from zero, one NaN.
void set_master(State& state, std::int64_t index, float value) {
  switch (state.format.param) {
    case Dtype::kFloat32:
      state.param.set(index, value);
      break;
    case Dtype::kBfloat16: {
      const std::int64_t bits = std::isnan(value) ? 0x7FC00000 : reference::bits_of(value);
      const std::int64_t tail = bits % 65536, upper = bits / 65536 + (tail >= 32768 ? 1 : 0);
      state.param.set(index, static_cast<std::uint16_t>(upper));
      state.companion.set(index, static_cast<std::int16_t>(bits - upper * 65536));
      break;
    }
    case Dtype::kFloat16:
      state.companion.set(index, value);
      state.param.set(index, reference::to_half(value));
      break;
  }
}

bool is_non_negative(const State& state, int which) {
  return reference::is_non_negative(state.format.rule, which);
}

}  // namespace

float master(State& state, std::int64_t index) {
  if (state.format.param == Dtype::kFloat32) return state.param.get<float>(index);
  if (state.format.param == Dtype::kFloat16) return state.companion.get<float>(index);
  const std::int64_t upper = state.param.get<std::uint16_t>(index);
  const std::int64_t bits = upper * 65536 + state.companion.get<std::int16_t>(index);
  return reference::float_of(static_cast<std::uint32_t>(bits));
}

float moment(State& state, int which, std::int64_t index) {
  if (state.format.moments != MomentFormat::kBlock8) return state.moments[which].get_float(index);
  const int exponent = state.exponents[which].get<std::uint8_t>(index / kScaleBlockNumel);
  return reference::decode(state.moments[which].get<std::uint8_t>(index), exponent,
                           {is_non_negative(state, which)});
}

// With a seed, rounded by its noise; with none, to nearest.
void set_moments(State& state, int which, const std::vector<float>& values, std::int64_t first_index,
                 const std::uint32_t* seed) {
  Array& array = state.moments[which];
  for (std::int64_t start = 0; start < state.numel; start += kScaleBlockNumel) {
    const std::int64_t length = std::min(kScaleBlockNumel, state.numel - start);
    const int exponent = reference::block_exponent(values.data() + start, length);
    if (array.kind == Kind::kByte) {
      state.exponents[which].set(start / kScaleBlockNumel, static_cast<std::uint8_t>(exponent));
    }
    for (std::int64_t i = start; i < start + length; ++i) {
      const float value = values[static_cast<std::size_t>(i)];
      const std::uint32_t noise16 =
          seed == nullptr ? reference::kNearest : reference::noise(first_index + i, *seed, which);
      if (array.kind == Kind::kFloat32) {
        array.set(i, value);
      } else if (array.kind == Kind::kBfloat16) {
        array.set(i, reference::to_bf16(value, noise16));
      } else {
        array.set(i, reference::encode(value, exponent, {is_non_negative(state, which)}, noise16));
      }
    }
  }
}

State make_state(const Format& format, std::int64_t numel, std::uint64_t seed, std::int64_t head) {
  State state;
  state.format = format;
  state.numel = numel;
  state.param = Array(kind_of(format.param), numel, head);
  state.companion = new_companion(format.param, numel, head);
  state.grad = Array(kind_of(format.grad), numel, head);
  Numbers numbers(seed);
  for (std::int64_t i = 0; i < numel; ++i) {
    const Flavour flavour = flavour_of(i);
    set_master(state, i, draw(numbers, flavour == Flavour::kZero ? Flavour::kOrdinary : flavour, -4, 1));
    state.grad.set_float(i, draw_grad(numbers, flavour));
  }
  for (int which = 0; which < reference::num_moments(format.rule); ++which) {
    state.moments[which] = Array(moment_kind(format.moments), numel, head);
    if (format.moments == MomentFormat::kBlock8) {
      state.exponents[which] = Array(Kind::kByte, (numel + kScaleBlockNumel - 1) / kScaleBlockNumel, head);
    }
    const bool positive = is_non_negative(state, which);
    std::vector<float> values;
    for (std::int64_t i = 0; i < numel; ++i) {
      const float value = draw(numbers, flavour_of(i), positive ? -24 : -12, positive ? -2 : -1);
      values.push_back(positive ? std::fabs(value) : value);
    }
    set_moments(state, which, values, 0, nullptr);
  }
  return state;
}

zerooffload::optim::StepArrays step_arrays(State& state, std::int64_t begin) {
  zerooffload::optim::StepArrays arrays;
  arrays.param = state.param.at(begin);
  arrays.param_dtype = state.format.param;
  arrays.companion = state.format.param == Dtype::kFloat32 ? nullptr : state.companion.at(begin);
  arrays.grad = state.grad.at(begin);
  arrays.grad_dtype = state.format.grad;
  arrays.moment_format = state.format.moments;
  for (int which = 0; which < reference::num_moments(state.format.rule); ++which) {
    arrays.moments.values[which] = state.moments[which].at(begin);
    if (state.format.moments != MomentFormat::kBlock8) continue;
    arrays.moments.exponents[which] =
        static_cast<std::uint8_t*>(state.exponents[which].at(begin / kScaleBlockNumel));
  }
  return arrays;
}

void reference_step(State& state, const std::vector<float>& scalars, std::int64_t first_index,
                    std::uint32_t seed) {
  const int num_moments = reference::num_moments(state.format.rule);
  std::vector<float> stepped[2];
  for (std::int64_t i = 0; i < state.numel; ++i) {
    float moments[2] = {};
    for (int which = 0; which < num_moments; ++which) moments[which] = moment(state, which, i);
    const float grad = state.grad.get_float(i);
    set_master(state, i, reference::step(state.format.rule, master(state, i), grad, moments, scalars.data()));
    for (int which = 0; which < num_moments; ++which) stepped[which].push_back(moments[which]);
  }
  for (int which = 0; which < num_moments; ++which)
    set_moments(state, which, stepped[which], first_index, &seed);
}

std::vector<float> scalars_of(Rule rule) {
  switch (rule) {
    case Rule::kAdamW:
      return {0.37f, 0.999f, 0.9f, 0.1f, 0.99f, 0.01f, 0.2f, 1e-8f, 1e-3f};
    case Rule::kAdam:
      return {0.37f, 0.01f, 0.9f, 0.1f, 0.99f, 0.01f, 0.2f, 1e-8f, 1e-3f};
    case Rule::kAdagrad:
      return {0.37f, 0.01f, 0.1f, 1e-10f, 1e-2f};
    case Rule::kLion:
      return {0.37f, 0.999f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-4f};
    case Rule::kSgd:
      return {0.37f, 0.01f, 0.9f, 0.7f, 1.0f, 0.9f, 1e-2f};
  }
  return {};
}

bool same(const State& a, const State& b) {
  State one = a, other = b;
  const std::vector<Array*> firsts = one.arrays(), seconds = other.arrays();
  for (std::size_t i = 0; i < firsts.size(); ++i) {
    if (!same_bits(*firsts[i], *seconds[i])) return false;
  }
  return true;
}

void Fingerprint::add(const void* data, std::size_t num_bytes) {
  for (std::size_t i = 0; i < num_bytes; ++i) {
    value_ ^= static_cast<const unsigned char*>(data)[i];
    value_ *= 0x100000001B3u;
  }
}

void Fingerprint::add(State state) {
  for (Array* const array : state.arrays()) add(*array);
}

void Fingerprint::add(Array array) {
  unite_nans(array);
  add(array.bytes.data(), array.bytes.size());
}

}  // namespace states
