#pragma once

#include <cstdint>

namespace zerooffload {

enum class Dtype : std::uint8_t { kFloat32, kBfloat16 };

constexpr std::int64_t item_bytes(Dtype dtype) noexcept { return dtype == Dtype::kFloat32 ? 4 : 2; }

}  // namespace zerooffload
