// The kernels: plain loops, and a few in vectors by hand, compiled once per CPU target with
// ZEROOFFLOAD_KERNEL_TABLE naming the one symbol that the object file exports. Everything else is in the
// anonymous namespace, and nothing comes from the standard library, so that no code of one target can be
// linked into another.
//
// [Note: The same bits in every target]
// Each operation below rounds once. That needs -ffp-contract=off (no fused multiply-add), and the flags
// -fno-math-errno -fno-trapping-math, which change no result but let the compiler vectorize sqrt and
// selections. Loops are elementwise, or sum in lanes whose number does not depend on the vector width. What
// is not promised are a NaN's sign and payload: of two NaNs x86 keeps that of the operand that the compiler
// put first, and a new one (0/0) is negative on x86 and positive on Arm.

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
// Vectors by hand, where compilers make less of plain loops; see optim/vectors.hpp.
#define ZEROOFFLOAD_VECTORS
#include <immintrin.h>
#endif

#include "optim/kernel_table.hpp"

namespace zerooffload::optim {
namespace {

using Index = std::int64_t;

// --- numbers
// ---------------------------------------------------------------------------------------------------------

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

inline float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Compared as signed integers, for which SSE2 has an instruction.
inline bool is_nan(std::uint32_t bits) { return static_cast<std::int32_t>(bits & 0x7FFFFFFFu) > 0x7F800000; }

inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }
// The exponents differ by 112, which a multiplication makes up for, exactly and for denormals too. A NaN
// keeps its payload and becomes quiet, as in the CPUs' own conversions.
inline float to_float(Fp16 value) {
  const std::uint32_t half = value.bits, magnitude = half & 0x7FFFu;
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const std::uint32_t infinite = magnitude >= 0x7C00u ? 0x7F800000u : 0u;
  const std::uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
  return float_of(sign | finite | infinite | quiet);
}

// Round to nearest, ties to even. A bfloat16's NaN becomes 0x7FC0, an fp16's keeps sign and payload.
template <typename T>
T round_to(float value);
template <>
inline float round_to<float>(float value) {
  return value;
}
template <>
inline Bf16 round_to<Bf16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return Bf16{static_cast<std::uint16_t>(is_nan(bits) ? 0x7FC0u : rounded)};
}
// Of a denormal, adding 0.5 lets the addition round: its last place is then the half's.
template <>
inline Fp16 round_to<Fp16>(float value) {
  const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
  const std::int32_t ordered = static_cast<std::int32_t>(magnitude);
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  std::uint32_t half = ordered < 0x38800000 ? denormal : normal;
  half = ordered >= 0x477FF000 ? 0x7C00u : half;  // 65520 and more round to infinity
  half = ordered > 0x7F800000 ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : half;
  return Fp16{static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u))};
}

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline float sign_of(float value) { return value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : value; }

#if defined(ZEROOFFLOAD_VECTORS)
#include "optim/vectors.hpp"
#endif

// --- conversions
// -----------------------------------------------------------------------------------------------------

template <typename T>
void widen(const void* source, float* target, Index numel) {
  const T* const __restrict values = static_cast<const T*>(source);
  float* const __restrict floats = target;
  for (Index i = 0; i < numel; ++i) floats[i] = to_float(values[i]);
}

template <typename T>
void narrow(const float* source, void* target, Index numel) {
  const float* const __restrict floats = source;
  T* const __restrict values = static_cast<T*>(target);
  for (Index i = 0; i < numel; ++i) values[i] = round_to<T>(floats[i]);
}

#if defined(ZEROOFFLOAD_VECTORS)
// The CPU's own conversions give the same bits in a tenth of the instructions; compilers do not find them.
template <>
void widen<Fp16>(const void* source, float* target, Index numel) {
  const std::uint16_t* const halves = static_cast<const std::uint16_t*>(source);
  Index i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i));
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(packed));
  }
  for (; i < numel; ++i) target[i] = to_float(Fp16{halves[i]});
}

template <>
void narrow<Fp16>(const float* source, void* target, Index numel) {
  std::uint16_t* const halves = static_cast<std::uint16_t*>(target);
  Index i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), packed);
  }
  for (; i < numel; ++i) halves[i] = round_to<Fp16>(source[i]).bits;
}
#endif

// [Note: Splitting a float32 into bfloat16 and remainder]
// param = (bits + 0x8000) >> 16 rounds ties away from zero, so that remainder = bits - (param << 16) lies in
// [-0x8000, 0x7FFF] and fits an int16. With ties to even it would not: 65,537 masters share an even bfloat16.
// NaNs are made 0x7FC00000 first: the largest payloads would carry into the sign.
void split(const float* source, std::uint16_t* param, std::int16_t* remainder, Index numel) {
  const float* const __restrict masters = source;
  std::uint16_t* const __restrict params = param;
  std::int16_t* const __restrict remainders = remainder;
  for (Index i = 0; i < numel; ++i) {
    const std::uint32_t raw = bits_of(masters[i]);
    const std::uint32_t bits = is_nan(raw) ? 0x7FC00000u : raw;
    const std::uint32_t high = (bits + 0x8000u) >> 16;
    params[i] = static_cast<std::uint16_t>(high);
    remainders[i] = static_cast<std::int16_t>(bits - (high << 16));
  }
}

inline float join(std::uint16_t param, std::int16_t remainder) {
  const std::uint32_t low = static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder));
  return float_of((static_cast<std::uint32_t>(param) << 16) + low);
}

void join_all(const std::uint16_t* param, const std::int16_t* remainder, float* target, Index numel) {
  const std::uint16_t* const __restrict params = param;
  const std::int16_t* const __restrict remainders = remainder;
  float* const __restrict masters = target;
  for (Index i = 0; i < numel; ++i) masters[i] = join(params[i], remainders[i]);
}

// --- moments in fewer bits
// -------------------------------------------------------------------------------------------

// [Note: Stochastic rounding]
// A moving average changes by less than half of a low-bit number's last place in most steps: rounded to
// nearest it would stand still. Adding noise, uniform in one last place, and cutting off is right on average.
// The noise is a hash of the element's index and the caller's seed (the step), so results depend on nothing
// else: a multiplicative hash (Knuth, TAOCP 6.4), folded and multiplied once more. One moment takes its upper
// half, the other its lower half.
constexpr std::uint32_t kHashFactor = 0x9E3779B1u;
inline std::uint32_t hashed(std::uint32_t index, std::uint32_t seed) { return index * kHashFactor + seed; }
template <typename Word>
inline Word scrambled(Word hash) {
  return (hash ^ (hash >> 15)) * 0x85EBCA77u;
}
inline std::uint32_t noise(std::uint32_t index, std::uint32_t seed) { return scrambled(hashed(index, seed)); }
inline std::uint32_t noise_half(std::uint32_t all, int moment) {
  return moment == 0 ? all >> 16 : all & 0xFFFFu;
}

inline std::uint16_t dither_to_bf16(float value, std::uint32_t noise16) {
  const std::uint32_t bits = bits_of(value);
  return static_cast<std::uint16_t>(is_nan(bits) ? 0x7FC0u : (bits + noise16) >> 16);
}

// [Note: 8-bit moments]
// Blocks of kScaleBlockNumel elements share a scale, the power of two at or below the largest magnitude in
// them (block-wise quantization: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022;
// scales that are powers of two: the OCP Microscaling formats, 2023). Of x / scale, below 2, a code keeps the
// upper bits of a float: three bits of mantissa, the rest exponent with denormals, so that encoding and
// decoding are shifts and exact multiplications, and no table is looked up. A moment of any sign has 4 bits
// of exponent (numbers down to 2^-17 of the scale), one that is never negative has 5 (down to 2^-33; what is
// smaller but not 0 gets the smallest code, since 0 would mean a division by eps: Li et al., "Memory
// Efficient Optimizers with 4-bit States", 2023). The scale is kept as the exponent bits of a float. A NaN or
// infinity makes its whole block NaN.
enum class Sign { kAny, kNonNegative };

constexpr int kMantissaShift = 20;
constexpr std::uint32_t kLargestExponent = 254;

template <Sign kSign>
struct Code {
  // The largest code, as float bits; its exponent is that of numbers from scale to 2 * scale.
  static constexpr std::int32_t kLargest = ((kSign == Sign::kAny ? 128 : 256) << kMantissaShift) - 1;
  static constexpr std::uint32_t kExponent = kSign == Sign::kAny ? 15 : 31;
};

inline float power_of_two(std::uint32_t biased_exponent) {
  return float_of(biased_exponent == 0 ? 0x00400000u : biased_exponent << 23);
}

// The two factors of decoding or encoding a block: their product may be too large or too small for a float.
struct Factors {
  float first, second;
  std::uint32_t mask = 0xFFFFFFFFu;  // 0 in encoding a NaN block: a NaN's bits depend on the CPU
};
template <Sign kSign>
inline Factors decoding_factors(std::uint32_t exponent) {
  const float scale = exponent > kLargestExponent ? float_of(0x7FC00000u) : power_of_two(exponent);
  return {power_of_two(254 - Code<kSign>::kExponent), scale};
}
template <Sign kSign>
inline Factors encoding_factors(std::uint32_t exponent) {
  const bool is_nan = exponent > kLargestExponent;
  return {is_nan ? 0.0f : power_of_two(254 - exponent), power_of_two(Code<kSign>::kExponent),
          is_nan ? 0u : 0xFFFFFFFFu};
}

template <Sign kSign>
inline float decode(std::int32_t code, Factors by) {
  std::uint32_t bits = static_cast<std::uint32_t>(code) << kMantissaShift;
  if (kSign == Sign::kAny) bits &= 0x87FFFFFFu;  // the code's sign was extended
  return float_of(bits) * by.first * by.second;
}

template <Sign kSign>
inline std::int32_t encode(float value, Factors by, std::uint32_t noise16) {
  const std::uint32_t bits = bits_of(value * by.first * by.second) & by.mask;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::int32_t dithered = static_cast<std::int32_t>(magnitude + (noise16 << 4));
  dithered = dithered > Code<kSign>::kLargest ? Code<kSign>::kLargest : dithered;
  std::int32_t code = dithered >> kMantissaShift;
  if (kSign == Sign::kAny) return code | (static_cast<std::int32_t>(bits >> 24) & 0x80);
  const std::int32_t least = bits_of(value) == 0 ? 0 : 1;
  return code > least ? code : least;
}

// As bits, where a NaN is larger than all numbers.
inline std::int32_t larger_magnitude(std::int32_t largest, float value) {
  const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(value) & 0x7FFFFFFFu);
  return magnitude > largest ? magnitude : largest;
}
// Of a float's bits; 1 stands for denormals too, whose own exponent would make no normal scale.
inline std::uint8_t exponent_of(std::uint32_t bits) {
  const std::int32_t exponent = static_cast<std::int32_t>(bits >> 23 & 0xFFu);
  return static_cast<std::uint8_t>(exponent < 1 ? 1 : exponent);
}

// Codes in 32 bits, so that the loops that use them have lanes of one width. The sign of a moment is
// extended.
template <Sign kSign>
inline void unpack(const std::uint8_t* source, std::int32_t* target, Index numel) {
  const std::uint8_t* const __restrict bytes = source;
  std::int32_t* const __restrict words = target;
  for (Index i = 0; i < numel; ++i) {
    words[i] = kSign == Sign::kAny ? static_cast<std::int32_t>(static_cast<std::int8_t>(bytes[i])) : bytes[i];
  }
}
inline void pack(const std::int32_t* source, std::uint8_t* target, Index numel) {
  const std::int32_t* const __restrict words = source;
  std::uint8_t* const __restrict bytes = target;
  for (Index i = 0; i < numel; ++i) bytes[i] = static_cast<std::uint8_t>(words[i]);
}

// --- rules
// -----------------------------------------------------------------------------------------------------------

#include "optim/rules/adagrad.hpp"
#include "optim/rules/adam.hpp"
#include "optim/rules/adamw.hpp"
#include "optim/rules/lion.hpp"
#include "optim/rules/sgd.hpp"

// A rule's step over arrays, with masters, gradients and moments in each of their formats. Widening and
// joining stand in the loop of the step itself, where they cost little beside the root and the divisions.

// The master of element i, counted from `start`; `masters` is where the step writes it.
struct InPlace {
  InPlace(const MasterArrays&, Index) {}
  static float read(const float* masters, Index i) { return masters[i]; }
#if defined(ZEROOFFLOAD_VECTORS)
  static Floats read_vector(const float* masters, Index i) { return load_floats(masters + i); }
#endif
};

struct Joined {
  const std::uint16_t* __restrict param;
  const std::int16_t* __restrict remainder;
  Joined(const MasterArrays& arrays, Index start)
      : param(arrays.param + start), remainder(arrays.remainder + start) {}
  float read(const float*, Index i) const { return join(param[i], remainder[i]); }
#if defined(ZEROOFFLOAD_VECTORS)
  Floats read_vector(const float*, Index i) const { return load_joined(param + i, remainder + i); }
#endif
};

template <typename R, typename Masters, typename Grad>
void apply_float32(const MasterArrays& arrays, const MomentArrays& moments, const void* grads, Index numel,
                   const float* scalars, std::uint32_t, std::uint32_t) {
  typename R::Scalars k;  // on the stack, where no store below can change it, so that it stays in registers
  __builtin_memcpy(&k, scalars, sizeof k);
  const Masters from(arrays, 0);
  float* const __restrict masters = arrays.masters;
  const Grad* const __restrict grad = static_cast<const Grad*>(grads);
  float* const __restrict first = static_cast<float*>(moments.values[0]);
  if constexpr (R::kNumMoments == 2) {
    float* const __restrict second = static_cast<float*>(moments.values[1]);
    for (Index i = 0; i < numel; ++i) {
      masters[i] = R::step(from.read(masters, i), to_float(grad[i]), first[i], second[i], k);
    }
  } else {
    float none = 0.0f;
    for (Index i = 0; i < numel; ++i)
      masters[i] = R::step(from.read(masters, i), to_float(grad[i]), first[i], none, k);
  }
}

template <typename R, typename Masters, typename Grad>
void apply_bfloat16(const MasterArrays& arrays, const MomentArrays& moments, const void* grads, Index numel,
                    const float* scalars, std::uint32_t index, std::uint32_t seed) {
  typename R::Scalars k;
  __builtin_memcpy(&k, scalars, sizeof k);
  const Masters from(arrays, 0);
  float* const __restrict masters = arrays.masters;
  const Grad* const __restrict grad = static_cast<const Grad*>(grads);
  Bf16* const __restrict first = static_cast<Bf16*>(moments.values[0]);
  Bf16* const __restrict second = static_cast<Bf16*>(moments.values[R::kNumMoments - 1]);
  for (Index i = 0; i < numel; ++i) {
    const std::uint32_t random = noise(index + static_cast<std::uint32_t>(i), seed);
    float m = to_float(first[i]);
    float v = R::kNumMoments == 2 ? to_float(second[i]) : 0.0f;
    masters[i] = R::step(from.read(masters, i), to_float(grad[i]), m, v, k);
    first[i].bits = dither_to_bf16(m, noise_half(random, 0));
    if (R::kNumMoments == 2) second[i].bits = dither_to_bf16(v, noise_half(random, 1));
  }
}

// Where a block's moments are kept; a rule's only moment stands for both.
template <typename R>
struct KeptBlock {
  static constexpr bool kTwo = R::kNumMoments == 2;
  static constexpr int kLast = R::kNumMoments - 1;
  static constexpr Sign kFirst = R::kSigns[0], kSecond = R::kSigns[kLast];

  KeptBlock(const MomentArrays& moments, Index start)
      : first_codes(static_cast<std::uint8_t*>(moments.values[0]) + start),
        second_codes(static_cast<std::uint8_t*>(moments.values[kLast]) + start),
        first_exponent(moments.exponents[0] + start / kScaleBlockNumel),
        second_exponent(moments.exponents[kLast] + start / kScaleBlockNumel) {}

  std::uint8_t *first_codes, *second_codes, *first_exponent, *second_exponent;
};

// Moments whose exponents stand in the block already.
template <typename R>
__attribute__((noinline)) void encode_block(const float* first_values, const float* second_values,
                                            const MomentArrays& moments, Index start, Index numel,
                                            std::uint32_t index, std::uint32_t seed) {
  using Kept = KeptBlock<R>;
  const Kept block(moments, start);
  const Factors first_factors = encoding_factors<Kept::kFirst>(*block.first_exponent);
  const Factors second_factors = encoding_factors<Kept::kSecond>(*block.second_exponent);
  alignas(64) std::int32_t firsts[kScaleBlockNumel], seconds[kScaleBlockNumel];
  for (Index i = 0; i < numel; ++i) {
    const std::uint32_t random = noise(index + static_cast<std::uint32_t>(start + i), seed);
    firsts[i] = encode<Kept::kFirst>(first_values[i], first_factors, noise_half(random, 0));
    if constexpr (Kept::kTwo) {
      seconds[i] = encode<Kept::kSecond>(second_values[i], second_factors, noise_half(random, 1));
    }
  }
  pack(firsts, block.first_codes, numel);
  if constexpr (Kept::kTwo) pack(seconds, block.second_codes, numel);
}

// `numel` elements from `start` on, a block or what is left of one. Two loops: the scales are known when all
// of it is stepped.
template <typename R, typename Masters, typename Grad>
__attribute__((noinline)) void step_block(const MasterArrays& arrays, const MomentArrays& moments,
                                          const Grad* grads, Index start, Index numel,
                                          const typename R::Scalars& scalars, std::uint32_t index,
                                          std::uint32_t seed) {
  using Kept = KeptBlock<R>;
  const typename R::Scalars k = scalars;
  const Kept block(moments, start);
  alignas(64) std::int32_t first_codes[kScaleBlockNumel], second_codes[kScaleBlockNumel];
  unpack<Kept::kFirst>(block.first_codes, first_codes, numel);
  if constexpr (Kept::kTwo) unpack<Kept::kSecond>(block.second_codes, second_codes, numel);

  alignas(64) float firsts[kScaleBlockNumel], seconds[kScaleBlockNumel];
  const Masters from(arrays, start);
  float* const __restrict masters = arrays.masters + start;
  const Grad* const __restrict grad = grads + start;
  const Factors first_factors = decoding_factors<Kept::kFirst>(*block.first_exponent);
  const Factors second_factors = decoding_factors<Kept::kSecond>(*block.second_exponent);
  std::int32_t first_largest = 0, second_largest = 0;
  for (Index i = 0; i < numel; ++i) {
    float m = decode<Kept::kFirst>(first_codes[i], first_factors);
    float v = Kept::kTwo ? decode<Kept::kSecond>(second_codes[i], second_factors) : 0.0f;
    masters[i] = R::step(from.read(masters, i), to_float(grad[i]), m, v, k);
    firsts[i] = m;
    first_largest = larger_magnitude(first_largest, m);
    if constexpr (Kept::kTwo) {
      seconds[i] = v;
      second_largest = larger_magnitude(second_largest, v);
    }
  }

  *block.first_exponent = exponent_of(static_cast<std::uint32_t>(first_largest));
  if constexpr (Kept::kTwo) *block.second_exponent = exponent_of(static_cast<std::uint32_t>(second_largest));
  encode_block<R>(firsts, seconds, moments, start, numel, index, seed);
}

#if defined(ZEROOFFLOAD_VECTORS)
#include "optim/block8_vectors.hpp"
#else
// Leaves all to step_block.
template <typename R, typename Masters, typename Grad>
Index step_blocks(const MasterArrays&, const MomentArrays&, const Grad*, Index start, Index,
                  const typename R::Scalars&, std::uint32_t, std::uint32_t) {
  return start;
}
#endif

template <typename R, typename Masters, typename Grad>
void apply_block8(const MasterArrays& arrays, const MomentArrays& moments, const void* grads, Index numel,
                  const float* scalars, std::uint32_t index, std::uint32_t seed) {
  typename R::Scalars k;
  __builtin_memcpy(&k, scalars, sizeof k);
  const Grad* const grad = static_cast<const Grad*>(grads);
  for (Index start = 0; start < numel; start += kScaleBlockNumel) {
    start = step_blocks<R, Masters, Grad>(arrays, moments, grad, start, numel, k, index, seed);
    if (start == numel) return;
    const Index left = numel - start;
    step_block<R, Masters, Grad>(arrays, moments, grad, start,
                                 left < kScaleBlockNumel ? left : kScaleBlockNumel, k, index, seed);
  }
}

#define ZEROOFFLOAD_FORMATS(Masters, Grad) \
  {apply_float32<R, Masters, Grad>, apply_bfloat16<R, Masters, Grad>, apply_block8<R, Masters, Grad>}
template <typename R>
constexpr RuleEntry rule_entry() {
  return {{{ZEROOFFLOAD_FORMATS(InPlace, float), ZEROOFFLOAD_FORMATS(InPlace, Bf16)},
           {ZEROOFFLOAD_FORMATS(Joined, float), ZEROOFFLOAD_FORMATS(Joined, Bf16)}},
          R::kNumMoments,
          sizeof(typename R::Scalars) / sizeof(float)};
}
#undef ZEROOFFLOAD_FORMATS

// --- ranges
// ----------------------------------------------------------------------------------------------------------

#include "optim/step_ranges.hpp"

// --- gradients
// -------------------------------------------------------------------------------------------------------

// Lane j adds the squares of elements j, j + 16, ... in rising order; then the upper half of the lanes is
// added to the lower one until one is left. A float's square is exact in double.
struct SquareSum {
  // More elements; all calls but the last with a multiple of kNumLanes.
  void add(const float* source, Index numel) {
    const float* const __restrict floats = source;
    Index i = 0;
    for (; i + kNumLanes <= numel; i += kNumLanes) {
      for (int lane = 0; lane < kNumLanes; ++lane) {
        const double value = floats[i + lane];
        lanes[lane] += value * value;
      }
    }
    for (int lane = 0; i + lane < numel; ++lane) {
      const double value = floats[i + lane];
      lanes[lane] += value * value;
    }
  }

  double total() {
    for (int width = kNumLanes / 2; width >= 1; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
  }

  double lanes[kNumLanes] = {};
};

enum class Store { kNothing, kSum, kCopy };

#if defined(ZEROOFFLOAD_VECTORS)
#include "optim/gradients_vectors.hpp"
#else
// Leaves all to the plain loops.
template <Store kStore, typename Target, typename Source>
Index store_and_square_pieces(Target*, const Source*, Index, SquareSum&) {
  return 0;
}
#endif

// Small enough for what a piece touches to stay in the first-level cache between two loops over it.
constexpr Index kPieceNumel = 512;

template <typename Target, typename Source, Store kStore>
double store_and_square(void* target_array, const void* source_array, Index numel) {
  Target* const targets = static_cast<Target*>(target_array);
  const Source* const sources = static_cast<const Source*>(source_array);
  SquareSum squares;
  alignas(64) float piece[kPieceNumel];
  Index start = store_and_square_pieces<kStore>(targets, sources, numel, squares);
  for (; start < numel; start += kPieceNumel) {
    const Index length = numel - start < kPieceNumel ? numel - start : kPieceNumel;
    const Source* const __restrict source = sources + start;
    if constexpr (kStore == Store::kNothing) {
      for (Index i = 0; i < length; ++i) piece[i] = to_float(source[i]);
    } else {
      Target* const __restrict target = targets + start;
      for (Index i = 0; i < length; ++i) {
        const float term = to_float(source[i]);
        // Read back: a copy of the rounded struct would keep the loop from being vectorized.
        target[i] = round_to<Target>(kStore == Store::kSum ? to_float(target[i]) + term : term);
        piece[i] = to_float(target[i]);
      }
    }
    squares.add(piece, length);
  }
  return squares.total();
}

template <typename Source>
double square_sum(const void* grad, Index numel) {
  return store_and_square<Source, Source, Store::kNothing>(nullptr, grad, numel);
}

// --- traffic
// ---------------------------------------------------------------------------------------------------------

std::uint64_t scan(const void* bytes, Index num_words) {
  const std::uint64_t* const __restrict words = static_cast<const std::uint64_t*>(bytes);
  std::uint64_t all = 0;
  for (Index i = 0; i < num_words; ++i) all |= words[i];
  return all;
}

void rewrite(void* bytes, Index num_words, std::uint64_t zero) {
  std::uint64_t* const __restrict words = static_cast<std::uint64_t*>(bytes);
  for (Index i = 0; i < num_words; ++i) words[i] ^= zero;
}

}  // namespace

extern const KernelTable ZEROOFFLOAD_KERNEL_TABLE = {
    {rule_entry<AdamW>(), rule_entry<Adam>(), rule_entry<Adagrad>(), rule_entry<Lion>(), rule_entry<Sgd>()},
    step_range,
    {nullptr, widen<Bf16>, widen<Fp16>},
    {nullptr, narrow<Bf16>, narrow<Fp16>},
    split,
    join_all,
    scan,
    rewrite,
    {square_sum<float>, square_sum<Bf16>, square_sum<Fp16>},
    {{store_and_square<float, float, Store::kSum>, store_and_square<float, Bf16, Store::kSum>,
      store_and_square<float, Fp16, Store::kSum>},
     {nullptr, store_and_square<Bf16, Bf16, Store::kSum>, nullptr},
     {nullptr, nullptr, store_and_square<Fp16, Fp16, Store::kSum>}},
    {{store_and_square<float, float, Store::kCopy>, store_and_square<float, Bf16, Store::kCopy>,
      store_and_square<float, Fp16, Store::kCopy>},
     {nullptr, store_and_square<Bf16, Bf16, Store::kCopy>, nullptr},
     {nullptr, nullptr, store_and_square<Fp16, Fp16, Store::kCopy>}},
};

}  // namespace zerooffload::optim
