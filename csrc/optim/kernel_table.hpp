#pragma once

// The seam between the kernels, compiled once per CPU target, and the code that picks one of them.
//
// This header is compiled with every target's flags: plain structs and pointers only. An inline function or a
// template instance here could be emitted with AVX2 instructions and then be chosen by the linker for all
// targets.

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace zerooffload::optim {

// Elements that one square sum covers; ranges are cut between blocks only.
constexpr std::int64_t kBlockNumel = 4096;
// float64 lanes of a block's square sum.
constexpr int kNumLanes = 16;
// Elements that share one scale where moments are kept in 8 bits; a divisor of kBlockNumel.
constexpr std::int64_t kScaleBlockNumel = 128;

// What an optimizer does to one element: optim/rules/. One more is one more header there and one more line
// here and in kernels.cpp.
enum class Rule : std::uint8_t { kAdamW, kAdam, kAdagrad, kLion, kSgd };
constexpr int kNumRules = 5;
constexpr int kMaxMoments = 2;

// How moments are kept: float, bfloat16 bits, or 8-bit codes with one scale's exponent for each
// kScaleBlockNumel.
enum class MomentFormat : std::uint8_t { kFloat32, kBfloat16, kBlock8 };
constexpr int kNumMomentFormats = 3;

// Bytes of an element: of a Dtype, of the companion of a parameter of a Dtype (see StepArrays), of a moment.
constexpr std::int64_t kItemBytes[kNumDtypes] = {4, 2, 2};
constexpr std::int64_t kCompanionBytes[kNumDtypes] = {0, 2, 4};
constexpr std::int64_t kMomentBytes[kNumMomentFormats] = {4, 2, 1};

// Where a step finds the float32 masters: in place, or joined from a bfloat16 parameter and its remainder
// (both read only), and then left in `masters`.
enum class MasterFormat : std::uint8_t { kInPlace, kSplit };
constexpr int kNumMasterFormats = 2;

struct MasterArrays {
  float* masters;
  const std::uint16_t* param;
  const std::int16_t* remainder;
};

// Gradients that a step widens itself, as float or as bfloat16: Dtype's first two.
constexpr int kNumGradDtypes = 2;

struct MomentArrays {
  void* values[kMaxMoments];
  std::uint8_t* exponents[kMaxMoments];
};

// A rule's step, in place. `scalars` are the rule's Scalars, each computed in double by the caller and
// rounded once; `index` is that of the first element, and with `seed` decides how moments in fewer bits are
// rounded.
using ApplyRule = void (*)(const MasterArrays& masters, const MomentArrays& moments, const void* grad,
                           std::int64_t numel, const float* scalars, std::uint32_t index, std::uint32_t seed);

// What a step works on. It is in place, or, where an origin is given, the old values lie that many bytes from
// the new ones (parameters, and the companion and moments), in the same layout, and the new ones are written
// past the cache (see [Note: Beside the old values] in step_ranges.hpp). The float32 master of a parameter is
//   kFloat32   the parameter
//   kBfloat16  (param << 16) + int16 remainder, as bits; `companion` is the remainder
//   kFloat16   `companion`; the parameter is written only
struct StepArrays {
  void* param = nullptr;
  Dtype param_dtype = Dtype::kFloat32;
  void* companion = nullptr;
  const void* grad = nullptr;
  Dtype grad_dtype = Dtype::kFloat32;
  MomentFormat moment_format = MomentFormat::kFloat32;
  MomentArrays moments = {};
  std::ptrdiff_t param_origin = 0;
  std::ptrdiff_t record_origin = 0;
};

struct RuleEntry {
  ApplyRule apply[kNumMasterFormats][kNumGradDtypes][kNumMomentFormats];
  int num_moments;
  int num_scalars;
};

// One target's kernels. Those in arrays are indexed by Dtype, Rule or MomentFormat; null where there is
// nothing to do.
struct KernelTable {
  RuleEntry rules[kNumRules];

  // Elements [begin, end) of `arrays`, which begin on a block of scales. `index` is that of the first of all.
  void (*step_range)(const RuleEntry& rule, const StepArrays& arrays, std::int64_t begin, std::int64_t end,
                     const float* scalars, std::uint32_t index, std::uint32_t seed);

  // To and from float, `numel` elements. `narrow` rounds to nearest even.
  void (*widen[kNumDtypes])(const void* source, float* target, std::int64_t numel);
  void (*narrow[kNumDtypes])(const float* source, void* target, std::int64_t numel);
  void (*split)(const float* source, std::uint16_t* param, std::int16_t* remainder, std::int64_t numel);
  void (*join)(const std::uint16_t* param, const std::int16_t* remainder, float* target, std::int64_t numel);

  // Nothing but traffic: `scan` reads (and returns something of what it read), `rewrite` reads and writes
  // back what was there, as long as `zero` is 0.
  std::uint64_t (*scan)(const void* bytes, std::int64_t num_words);
  void (*rewrite)(void* bytes, std::int64_t num_words, std::uint64_t zero);

  // At most kBlockNumel elements, read once. `accumulate` (by the target's and the source's type) adds the
  // source to the target, `replace` copies; both return the square sum of the target as it then is.
  double (*square_sum[kNumDtypes])(const void* grad, std::int64_t numel);
  double (*accumulate[kNumDtypes][kNumDtypes])(void* target, const void* source, std::int64_t numel);
  double (*replace[kNumDtypes][kNumDtypes])(void* target, const void* source, std::int64_t numel);
};

extern const KernelTable kBaselineKernels;
#if defined(ZEROOFFLOAD_HAS_AVX2)
extern const KernelTable kAvx2Kernels;
#endif
#if defined(ZEROOFFLOAD_HAS_AVX512)
extern const KernelTable kAvx512Kernels;
#endif
#if defined(ZEROOFFLOAD_HAS_NEON)
extern const KernelTable kNeonKernels;
#endif

}  // namespace zerooffload::optim
