#include "optim/launch.hpp"

#include <stdexcept>
#include <string>

#include "cpu/target.hpp"

namespace zerooffload::optim {

const KernelTable& active_kernels() {
  switch (cpu::active_target()) {
    case cpu::Target::kBaseline:
      break;
    case cpu::Target::kNeon:
#if defined(ZEROOFFLOAD_HAS_NEON)
      return kNeonKernels;
#else
      break;
#endif
    case cpu::Target::kAvx2:
#if defined(ZEROOFFLOAD_HAS_AVX2)
      return kAvx2Kernels;
#else
      break;
#endif
    case cpu::Target::kAvx512:
#if defined(ZEROOFFLOAD_HAS_AVX512)
      return kAvx512Kernels;
#else
      break;
#endif
  }
  return kBaselineKernels;
}

void check_arguments(std::initializer_list<Argument> arguments, std::int64_t numel) {
  if (numel < 0) throw std::invalid_argument("numel: expected 0 or more, got " + std::to_string(numel));
  if (numel == 0) return;
  for (const Argument& argument : arguments) {
    const auto address = reinterpret_cast<std::uintptr_t>(argument.address);
    const auto item_bytes = static_cast<std::uintptr_t>(argument.item_bytes);
    if (address != 0 && address % item_bytes == 0) continue;
    throw std::invalid_argument(std::string(argument.name) + ": expected an address on a multiple of " +
                                std::to_string(item_bytes) + " bytes, got " + std::to_string(address));
  }
}

}  // namespace zerooffload::optim
