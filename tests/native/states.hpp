#pragma once

// Arrays to step on, their values the same on every machine, and what they have become.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "optim/step.hpp"

namespace states {

using zerooffload::Dtype;
using zerooffload::optim::MomentFormat;
using zerooffload::optim::Rule;

constexpr Rule kRules[] = {Rule::kAdamW, Rule::kAdam, Rule::kAdagrad, Rule::kLion, Rule::kSgd};
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
constexpr MomentFormat kMomentFormats[] = {MomentFormat::kFloat32, MomentFormat::kBfloat16,
                                           MomentFormat::kBlock8};

// A linear congruential generator (Knuth's MMIX), of which the upper half is used.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}
  std::uint32_t bits();
  // Of any sign, with an exponent in [low, high]; denormals below -126.
  float number(int low, int high);

 private:
  std::uint64_t state_;
};

enum class Kind { kFloat32, kBfloat16, kFloat16, kInt16, kByte };
int kind_bytes(Kind kind);
Kind kind_of(Dtype dtype);

// Elements that start `head` elements into their memory.
class Array {
 public:
  Array() = default;
  Array(Kind kind, std::int64_t numel, std::int64_t head);

  void* data() { return at(0); }
  void* at(std::int64_t index);
  template <typename T>
  T get(std::int64_t index) {
    T value;
    std::memcpy(&value, at(index), sizeof value);
    return value;
  }
  template <typename T>
  void set(std::int64_t index, T value) {
    std::memcpy(at(index), &value, sizeof value);
  }
  // As a float, rounded to nearest; not for kInt16 and kByte.
  float get_float(std::int64_t index);
  void set_float(std::int64_t index, float value);

  Kind kind = Kind::kByte;
  std::int64_t numel = 0, head = 0;
  std::vector<unsigned char> bytes;
};

// All NaNs become one: neither sign nor payload of a new one is the same on every CPU.
void unite_nans(Array& array);
bool same_bits(const Array& a, const Array& b);

struct Format {
  Rule rule = Rule::kAdamW;
  Dtype param = Dtype::kFloat32, grad = Dtype::kFloat32;
  MomentFormat moments = MomentFormat::kFloat32;
};
std::string name_of(Rule rule);
std::string name_of(Dtype dtype);
std::string name_of(MomentFormat format);
std::string name_of(const Format& format);
std::vector<Format> all_formats();

struct State {
  Format format;
  std::int64_t numel = 0;
  Array param, companion, grad, moments[2], exponents[2];

  std::vector<Array*> arrays() {
    return {&param, &companion, &grad, &moments[0], &moments[1], &exponents[0], &exponents[1]};
  }
};

// Blocks of kScaleBlockNumel elements in turn of ordinary numbers, zeros, denormals, numbers near the
// largest, and ordinary ones with infinities and NaNs among them.
State make_state(const Format& format, std::int64_t numel, std::uint64_t seed, std::int64_t head = 0);

// The arrays from element `begin` on, for the kernels.
zerooffload::optim::StepArrays step_arrays(State& state, std::int64_t begin = 0);

// The master of an element, and a moment.
float master(State& state, std::int64_t index);
float moment(State& state, int which, std::int64_t index);
void set_moments(State& state, int which, const std::vector<float>& values, std::int64_t first_index,
                 const std::uint32_t* seed);

// What a step makes of it, by the scalar reference.
void reference_step(State& state, const std::vector<float>& scalars, std::int64_t first_index,
                    std::uint32_t seed);

// Scalars as they might be at some step.
std::vector<float> scalars_of(Rule rule);

// Equal to the bit, but for NaNs and for codes of blocks that are NaN.
bool same(const State& a, const State& b);

// FNV-1a, 64 bits (Fowler, Noll and Vo), over bytes.
class Fingerprint {
 public:
  void add(const void* data, std::size_t num_bytes);
  void add(State state);
  void add(Array array);
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325u;
};

}  // namespace states
