#pragma once

// The kernels' arithmetic once more, by other means, one element at a time: numbers are scaled and rounded in
// double, and every operation of a rule is rounded to float on its own.

#include <cstdint>
#include <cstring>

#include "optim/kernel_table.hpp"

namespace reference {

// Noise with which moments in fewer bits are rounded to nearest; of numbers that the format has, it changes
// nothing.
constexpr std::uint32_t kNearest = 0x8000;

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Conversions; `to_` rounds to nearest, ties to even.
float from_half(std::uint16_t half);
std::uint16_t to_half(float value);
float from_bf16(std::uint16_t upper);
std::uint16_t to_bf16(float value);

// 16 bits for an element's first (0) or second (1) moment.
std::uint32_t noise(std::int64_t index, std::uint32_t seed, int moment);
std::uint16_t to_bf16(float value, std::uint32_t noise16);

// 8-bit codes of a block whose scale is 2^(exponent - 127); 255 stands for a block that is NaN.
struct CodeFormat {
  bool non_negative;
};
int block_exponent(const float* values, std::int64_t numel);
float decode(std::uint8_t code, int exponent, CodeFormat format);
std::uint8_t encode(float value, int exponent, CodeFormat format, std::uint32_t noise16);

// A rule's step of one element; the moments are changed.
float step(zerooffload::optim::Rule rule, float param, float grad, float moments[2], const float* scalars);

// Of the rule, by its paper.
int num_moments(zerooffload::optim::Rule rule);
bool is_non_negative(zerooffload::optim::Rule rule, int moment);

}  // namespace reference
