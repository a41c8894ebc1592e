#pragma once

#include <cfenv>

namespace zerooffload {

// Round to nearest, denormals kept, for the time of one scope.
//
// A thread inherits its creator's floating-point mode, and a user (torch.set_flush_denormal) or a library
// linked with -ffast-math may have changed it: without this, results would depend on which thread does which
// part. The C library's default environment covers the flush-to-zero bits of x86 and aarch64 as well.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept {
    std::fegetenv(&previous_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&previous_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t previous_;
};

}  // namespace zerooffload
