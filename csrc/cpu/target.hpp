#pragma once

#include <string>
#include <vector>

namespace zerooffload::cpu {

// An instruction set for which the kernels were compiled. Listed from the plainest to the best.
enum class Target { kBaseline, kNeon, kAvx2, kAvx512 };

// The name by which ZEROOFFLOAD_CPU_TARGET and set_target know it.
const char* target_name(Target target) noexcept;

// The targets that this build has and this CPU can run, best last. Never empty.
const std::vector<Target>& supported_targets();

// The target in use: the best supported one, or that named by the environment variable ZEROOFFLOAD_CPU_TARGET
// (read at the first call). std::invalid_argument if that name is unknown or not supported here.
Target active_target();

// Changes the target of the whole process. std::invalid_argument as above.
void set_target(const std::string& name);

}  // namespace zerooffload::cpu
