#include "cpu/target.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace zerooffload::cpu {
namespace {

constexpr const char* kVariable = "ZEROOFFLOAD_CPU_TARGET";
constexpr int kUndecided = -1;

// The choice is a property of the process, like the CPU that it describes.
std::atomic<int> chosen{kUndecided};

bool cpu_can_run(Target target) {
  switch (target) {
    case Target::kBaseline:
      return true;
    case Target::kNeon:
#if defined(ZEROOFFLOAD_HAS_NEON)
      return true;  // every 64-bit Arm has it
#else
      return false;
#endif
    case Target::kAvx2:
#if defined(ZEROOFFLOAD_HAS_AVX2)
      // Asks for the operating system's register saving as well.
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
#else
      return false;
#endif
    case Target::kAvx512:
#if defined(ZEROOFFLOAD_HAS_AVX512)
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
#else
      return false;
#endif
  }
  return false;
}

Target parse(const std::string& name, const std::string& source) {
  std::string names;
  for (const Target target : supported_targets()) {
    if (name == target_name(target)) return target;
    names += names.empty() ? "" : ", ";
    names += target_name(target);
  }
  throw std::invalid_argument(source + ": CPU target '" + name +
                              "' is unknown or not supported by this build and CPU; supported: " + names);
}

}  // namespace

const char* target_name(Target target) noexcept {
  switch (target) {
    case Target::kBaseline:
      return "baseline";
    case Target::kNeon:
      return "neon";
    case Target::kAvx2:
      return "avx2";
    case Target::kAvx512:
      return "avx512";
  }
  return "";
}

const std::vector<Target>& supported_targets() {
  static const std::vector<Target> supported = [] {
    std::vector<Target> found;
    for (const Target target : {Target::kBaseline, Target::kNeon, Target::kAvx2, Target::kAvx512}) {
      if (cpu_can_run(target)) found.push_back(target);
    }
    return found;
  }();
  return supported;
}

Target active_target() {
  const int known = chosen.load(std::memory_order_relaxed);
  if (known != kUndecided) return static_cast<Target>(known);
  const char* const forced = std::getenv(kVariable);
  const bool is_forced = forced != nullptr && *forced != '\0';
  const Target target = is_forced ? parse(forced, kVariable) : supported_targets().back();
  // Only if nobody has set one meanwhile: an explicit set_target wins over the environment.
  int expected = kUndecided;
  chosen.compare_exchange_strong(expected, static_cast<int>(target));
  return static_cast<Target>(chosen.load());
}

void set_target(const std::string& name) { chosen.store(static_cast<int>(parse(name, "set_target"))); }

}  // namespace zerooffload::cpu
