#include "scalar_reference.hpp"

#include <cmath>

namespace reference {
namespace {

using zerooffload::optim::Rule;

// volatile: the result is rounded to float on its own, whatever the compiler would like to contract.
float rounded(float value) {
  volatile float result = value;
  return result;
}
float add(float a, float b) { return rounded(a + b); }
float sub(float a, float b) { return rounded(a - b); }
float mul(float a, float b) { return rounded(a * b); }
float div(float a, float b) { return rounded(a / b); }
float root(float a) { return rounded(std::sqrt(a)); }
float sign(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }

// first * second + third * fourth
float blend(float a, float b, float c, float d) { return add(mul(a, b), mul(c, d)); }

// What Adam and AdamW subtract; `k` from beta1 on.
float adam_change(float grad, float moments[2], const float* k) {
  moments[0] = blend(k[0], moments[0], k[1], grad);
  moments[1] = blend(k[2], moments[1], k[3], mul(grad, grad));
  const float denominator = add(mul(root(moments[1]), k[4]), k[5]);
  return mul(k[6], div(moments[0], denominator));
}

float adamw(float param, float raw_grad, float moments[2], const float* k) {
  return sub(mul(param, k[1]), adam_change(mul(raw_grad, k[0]), moments, k + 2));
}

float adam(float param, float raw_grad, float moments[2], const float* k) {
  return sub(param, adam_change(blend(raw_grad, k[0], k[1], param), moments, k + 2));
}

float adagrad(float param, float raw_grad, float moments[2], const float* k) {
  const float grad = blend(raw_grad, k[0], k[1], param);
  moments[0] = add(add(moments[0], k[2]), mul(grad, grad));
  return sub(param, mul(k[4], div(grad, add(root(moments[0]), k[3]))));
}

float lion(float param, float raw_grad, float moments[2], const float* k) {
  const float grad = mul(raw_grad, k[0]);
  const float direction = blend(k[2], moments[0], k[3], grad);
  moments[0] = blend(k[4], moments[0], k[5], grad);
  return sub(mul(param, k[1]), mul(k[6], sign(direction)));
}

float sgd(float param, float raw_grad, float moments[2], const float* k) {
  const float grad = blend(raw_grad, k[0], k[1], param);
  moments[0] = blend(k[2], moments[0], k[3], grad);
  return sub(param, mul(k[6], blend(k[4], grad, k[5], moments[0])));
}

// The exponent field of codes from the scale up to twice the scale.
int top_field(CodeFormat format) { return format.non_negative ? 31 : 15; }

}  // namespace

float from_half(std::uint16_t half) {
  const int field = half >> 10 & 0x1F, mantissa = half & 0x3FF;
  const std::uint32_t sign_bit = static_cast<std::uint32_t>(half >> 15) << 31;
  if (field == 31) {  // a NaN keeps its payload and becomes quiet
    const std::uint32_t quiet = mantissa == 0 ? 0u : 0x00400000u;
    return float_of(sign_bit | 0x7F800000u | quiet | static_cast<std::uint32_t>(mantissa) << 13);
  }
  const double magnitude = field == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, field - 25);
  return float_of(sign_bit | bits_of(static_cast<float>(magnitude)));
}

std::uint16_t to_half(float value) {
  const auto sign_bit = static_cast<std::uint16_t>(bits_of(value) >> 16 & 0x8000u);
  if (std::isnan(value))
    return static_cast<std::uint16_t>(sign_bit | 0x7E00u | (bits_of(value) >> 13 & 0x3FFu));
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520) return static_cast<std::uint16_t>(sign_bit | 0x7C00u);
  int exponent = -14;  // of denormals too
  if (magnitude >= 0x1p-14) exponent = std::ilogb(magnitude);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<std::uint16_t>(sign_bit | ((exponent + 14) * 1024 + steps));
}

float from_bf16(std::uint16_t upper) { return float_of(static_cast<std::uint32_t>(upper) << 16); }

std::uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const std::uint32_t lower = bits_of(value) & 0xFFFF0000u;
  const std::uint32_t tail = bits_of(value) - lower;  // linear in the value between two bfloat16
  const bool is_odd = (lower & 0x10000u) != 0;
  const bool up = tail > 0x8000u || (tail == 0x8000u && is_odd);
  return static_cast<std::uint16_t>((lower >> 16) + (up ? 1 : 0));
}

std::uint32_t noise(std::int64_t index, std::uint32_t seed, int moment) {
  std::uint64_t x = (static_cast<std::uint64_t>(index) & 0xFFFFFFFFu) * 2654435761u;
  x = (x + seed) & 0xFFFFFFFFu;
  x ^= x / 32768;
  x = x * 2246822519u & 0xFFFFFFFFu;
  return static_cast<std::uint32_t>(moment == 0 ? x / 65536 : x % 65536);
}

std::uint16_t to_bf16(float value, std::uint32_t noise16) {
  if (std::isnan(value)) return 0x7FC0;
  const std::uint32_t lower = bits_of(value) >> 16, tail = bits_of(value) & 0xFFFFu;
  return static_cast<std::uint16_t>(lower + (tail + noise16 >= 65536 ? 1 : 0));
}

int block_exponent(const float* values, std::int64_t numel) {
  int largest = -126;
  for (std::int64_t i = 0; i < numel; ++i) {
    if (!std::isfinite(values[i])) return 255;
    if (values[i] != 0 && std::ilogb(values[i]) > largest) largest = std::ilogb(values[i]);
  }
  return largest + 127;
}

float decode(std::uint8_t code, int exponent, CodeFormat format) {
  if (exponent == 255) return std::nanf("");
  const int magnitude = format.non_negative ? code : code & 0x7F;
  const int field = magnitude / 8, eighths = magnitude % 8;
  const int power = field == 0 ? 1 : field;
  const double ratio = std::ldexp(field == 0 ? eighths : 8 + eighths, power - top_field(format) - 3);
  const auto value = static_cast<float>(std::ldexp(ratio, exponent - 127));
  return !format.non_negative && (code & 0x80) != 0 ? -value : value;
}

std::uint8_t encode(float value, int exponent, CodeFormat format, std::uint32_t noise16) {
  if (exponent == 255) return format.non_negative && bits_of(value) != 0 ? 1 : 0;
  const double ratio = std::ldexp(std::fabs(static_cast<double>(value)), 127 - exponent);
  const int top = top_field(format), largest = format.non_negative ? 255 : 127;
  const int power = ratio >= std::ldexp(1, 1 - top) ? std::ilogb(ratio) : 1 - top;
  // In steps between two codes, and those in 2^20 parts, which are what remains of a float's mantissa.
  const double parts = std::nearbyint(std::ldexp(ratio, 3 - power + 20));
  const auto steps = static_cast<int>(std::floor((parts + 16.0 * noise16) / 0x1p20));
  int code = (power + top - 1) * 8 + steps;
  if (code > largest) code = largest;
  if (format.non_negative) return static_cast<std::uint8_t>(code == 0 && bits_of(value) != 0 ? 1 : code);
  return static_cast<std::uint8_t>(code + (std::signbit(value) ? 128 : 0));
}

float step(Rule rule, float param, float grad, float moments[2], const float* scalars) {
  switch (rule) {
    case Rule::kAdamW:
      return adamw(param, grad, moments, scalars);
    case Rule::kAdam:
      return adam(param, grad, moments, scalars);
    case Rule::kAdagrad:
      return adagrad(param, grad, moments, scalars);
    case Rule::kLion:
      return lion(param, grad, moments, scalars);
    case Rule::kSgd:
      return sgd(param, grad, moments, scalars);
  }
  return param;
}

int num_moments(Rule rule) { return rule == Rule::kAdamW || rule == Rule::kAdam ? 2 : 1; }

bool is_non_negative(Rule rule, int moment) {
  return rule == Rule::kAdagrad || (num_moments(rule) == 2 && moment == 1);
}

}  // namespace reference
