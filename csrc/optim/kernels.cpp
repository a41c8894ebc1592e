// The kernels: plain loops, compiled once per CPU target with ZEROOFFLOAD_KERNEL_TABLE naming the one symbol
// that the object file exports. Everything else is in the anonymous namespace, and nothing comes from the
// standard library, so that no code of one target can be linked into another.
//
// [Note: The same bits in every target]
// Each operation below rounds once. That needs -ffp-contract=off (no fused multiply-add), and the flags
// -fno-math-errno -fno-trapping-math, which change no result but let the compiler vectorize sqrt and
// selections. Loops are elementwise, or sum in lanes whose number does not depend on the vector width. What
// is not promised is the payload of a NaN that comes from two NaNs: there x86 keeps that of the operand that
// the compiler put first.

#include <cstdint>

#include "optim/kernel_table.hpp"

namespace zerooffload::optim {
namespace {

using Index = std::int64_t;

struct Bf16 {
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
inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

// Compared as signed integers, for which SSE2 has an instruction.
inline bool is_nan(std::uint32_t bits) { return static_cast<std::int32_t>(bits & 0x7FFFFFFFu) > 0x7F800000; }

// Round to nearest, ties to even; every NaN becomes 0x7FC0.
inline Bf16 round_to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return Bf16{static_cast<std::uint16_t>(is_nan(bits) ? 0x7FC0u : rounded)};
}

// [Note: Splitting a float32 into bfloat16 and remainder]
// param = (bits + 0x8000) >> 16 rounds ties away from zero, so that remainder = bits - (param << 16) lies in
// [-0x8000, 0x7FFF] and fits an int16. With ties to even it would not: 65,537 masters share an even bfloat16.
// NaNs are made 0x7FC00000 first: the largest payloads would carry into the sign.
struct SplitFloat {
  std::uint16_t param;
  std::int16_t remainder;
};
inline SplitFloat split(float master) {
  const std::uint32_t raw = bits_of(master);
  const std::uint32_t bits = is_nan(raw) ? 0x7FC00000u : raw;
  const std::uint32_t high = (bits + 0x8000u) >> 16;
  return SplitFloat{static_cast<std::uint16_t>(high), static_cast<std::int16_t>(bits - (high << 16))};
}
inline float join(std::uint16_t param, std::int16_t remainder) {
  const std::uint32_t low = static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder));
  return float_of((static_cast<std::uint32_t>(param) << 16) + low);
}

void split_fp32(const float* source, std::uint16_t* param, std::int16_t* remainder, Index begin, Index end) {
  const float* const __restrict masters = source;
  std::uint16_t* const __restrict params = param;
  std::int16_t* const __restrict remainders = remainder;
  for (Index i = begin; i < end; ++i) {
    const SplitFloat parts = split(masters[i]);
    params[i] = parts.param;
    remainders[i] = parts.remainder;
  }
}

void join_fp32(const std::uint16_t* param, const std::int16_t* remainder, float* target, Index begin,
               Index end) {
  const std::uint16_t* const __restrict params = param;
  const std::int16_t* const __restrict remainders = remainder;
  float* const __restrict masters = target;
  for (Index i = begin; i < end; ++i) masters[i] = join(params[i], remainders[i]);
}

// The AdamW step of one element: the order of operations is a public promise (architecture, section 9).
inline float adamw(float param, float raw_grad, float* exp_avg, float* exp_avg_sq, const AdamWScalars& k) {
  const float grad = raw_grad * k.grad_factor;
  const float decayed = param * k.decay;
  const float m = k.beta1 * *exp_avg + k.one_minus_beta1 * grad;
  const float v = k.beta2 * *exp_avg_sq + k.one_minus_beta2 * (grad * grad);
  *exp_avg = m;
  *exp_avg_sq = v;
  const float denominator = __builtin_sqrtf(v) / k.bias2_sqrt + k.eps;
  return decayed - k.step_size * (m / denominator);
}

template <typename Grad>
void adamw_fp32(const AdamWFp32Arrays& arrays, const AdamWScalars& scalars, Index begin, Index end) {
  const AdamWScalars k = scalars;  // a copy that no store below can change, so that it stays in registers
  float* const __restrict param = arrays.param;
  float* const __restrict exp_avg = arrays.exp_avg;
  float* const __restrict exp_avg_sq = arrays.exp_avg_sq;
  const Grad* const __restrict grad = static_cast<const Grad*>(arrays.grad);
  for (Index i = begin; i < end; ++i) {
    param[i] = adamw(param[i], to_float(grad[i]), &exp_avg[i], &exp_avg_sq[i], k);
  }
}

// The stepped masters go through a buffer that stays in the first-level cache, a tile at a time: one loop
// that also split them would need more registers than AVX2 has, and took a fifth longer.
template <typename Grad>
void adamw_bf16(const AdamWBf16Arrays& arrays, const AdamWScalars& scalars, Index begin, Index end) {
  constexpr Index kTileNumel = 512;
  alignas(64) float masters[kTileNumel];
  const AdamWScalars k = scalars;
  for (Index start = begin; start < end; start += kTileNumel) {
    const Index numel = end - start < kTileNumel ? end - start : kTileNumel;
    const std::uint16_t* const __restrict param = arrays.param + start;
    const std::int16_t* const __restrict remainder = arrays.remainder + start;
    float* const __restrict exp_avg = arrays.exp_avg + start;
    float* const __restrict exp_avg_sq = arrays.exp_avg_sq + start;
    const Grad* const __restrict grad = static_cast<const Grad*>(arrays.grad) + start;
    for (Index i = 0; i < numel; ++i) {
      const float master = join(param[i], remainder[i]);
      masters[i] = adamw(master, to_float(grad[i]), &exp_avg[i], &exp_avg_sq[i], k);
    }
    split_fp32(masters, arrays.param + start, arrays.remainder + start, 0, numel);
  }
}

// Lane j adds the squares of elements j, j + 16, ... in rising order; then the upper half of the lanes is
// added to the lower one until one is left. A float's square is exact in double.
template <typename Grad>
double square_sum(const void* source, Index begin, Index end) {
  const Grad* const __restrict grad = static_cast<const Grad*>(source);
  double lanes[kNumLanes] = {};
  Index i = begin;
  for (; i + kNumLanes <= end; i += kNumLanes) {
    for (int lane = 0; lane < kNumLanes; ++lane) {
      const double value = to_float(grad[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; i + lane < end; ++lane) {
    const double value = to_float(grad[i + lane]);
    lanes[lane] += value * value;
  }
  for (int width = kNumLanes / 2; width >= 1; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

void accumulate_fp32(void* target, const void* source, Index begin, Index end) {
  float* const __restrict sums = static_cast<float*>(target);
  const float* const __restrict terms = static_cast<const float*>(source);
  for (Index i = begin; i < end; ++i) sums[i] += terms[i];
}

void accumulate_bf16(void* target, const void* source, Index begin, Index end) {
  Bf16* const __restrict sums = static_cast<Bf16*>(target);
  const Bf16* const __restrict terms = static_cast<const Bf16*>(source);
  for (Index i = begin; i < end; ++i) sums[i] = round_to_bf16(to_float(sums[i]) + to_float(terms[i]));
}

}  // namespace

extern const KernelTable ZEROOFFLOAD_KERNEL_TABLE = {
    {adamw_fp32<float>, adamw_fp32<Bf16>},
    {adamw_bf16<float>, adamw_bf16<Bf16>},
    {square_sum<float>, square_sum<Bf16>},
    {accumulate_fp32, accumulate_bf16},
    split_fp32,
    join_fp32,
};

}  // namespace zerooffload::optim
