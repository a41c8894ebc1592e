#pragma once

// The seam between the kernels, compiled once per CPU target, and the code that picks one of them.
//
// This header is compiled with every target's flags: plain structs and pointers only. An inline function or a
// template instance here could be emitted with AVX2 instructions and then be chosen by the linker for all
// targets.

#include <cstdint>

namespace zerooffload::optim {

// Elements that one square sum covers; ranges are cut between blocks only.
constexpr std::int64_t kBlockNumel = 4096;
// float64 lanes of a block's square sum.
constexpr int kNumLanes = 16;

// Computed in double by the caller and rounded once to float.
struct AdamWScalars {
  float grad_factor;  // unscale and clip
  float decay;        // 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float bias2_sqrt;  // sqrt(1 - beta2^t)
  float eps;
  float step_size;  // lr / (1 - beta1^t)
};

struct AdamWFp32Arrays {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
};

// The fp32 master is (param << 16) + remainder, as bits.
struct AdamWBf16Arrays {
  std::uint16_t* param;
  std::int16_t* remainder;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
};

// One target's kernels. Each works on the elements [begin, end) of its arrays; those of a pair are indexed by
// the Dtype of the gradient (or of both arrays, for accumulate).
struct KernelTable {
  using AdamWFp32 = void (*)(const AdamWFp32Arrays&, const AdamWScalars&, std::int64_t begin,
                             std::int64_t end);
  using AdamWBf16 = void (*)(const AdamWBf16Arrays&, const AdamWScalars&, std::int64_t begin,
                             std::int64_t end);
  using SquareSum = double (*)(const void* grad, std::int64_t begin, std::int64_t end);
  using Accumulate = void (*)(void* target, const void* source, std::int64_t begin, std::int64_t end);
  using Split = void (*)(const float*, std::uint16_t* param, std::int16_t* remainder, std::int64_t begin,
                         std::int64_t end);
  using Join = void (*)(const std::uint16_t* param, const std::int16_t* remainder, float*, std::int64_t begin,
                        std::int64_t end);

  AdamWFp32 adamw_fp32[2];
  AdamWBf16 adamw_bf16[2];
  SquareSum square_sum[2];  // at most kBlockNumel elements
  Accumulate accumulate[2];
  Split split_fp32;
  Join join_fp32;
};

extern const KernelTable kBaselineKernels;
#if defined(ZEROOFFLOAD_HAS_AVX2)
extern const KernelTable kAvx2Kernels;
#endif

}  // namespace zerooffload::optim
