#pragma once

#include <cstdint>

namespace zerooffload {

// Floating types of arrays that come from outside. Nothing but this here: kernels include it
// (kernel_table.hpp).
enum class Dtype : std::uint8_t { kFloat32, kBfloat16, kFloat16 };
constexpr int kNumDtypes = 3;

}  // namespace zerooffload
