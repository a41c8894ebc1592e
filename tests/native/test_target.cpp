#include <cstdlib>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "cpu/target.hpp"

namespace cpu = zerooffload::cpu;

TEST(target_baseline_is_always_there) {
  CHECK(!cpu::supported_targets().empty());
  CHECK(cpu::supported_targets().front() == cpu::Target::kBaseline);
}

TEST(target_can_be_set_by_name) {
  for (const cpu::Target target : cpu::supported_targets()) {
    cpu::set_target(cpu::target_name(target));
    CHECK(cpu::active_target() == target);
  }
}

TEST(target_unknown_name_is_refused_and_changes_nothing) {
  const cpu::Target before = cpu::active_target();
  const std::string message = CHECK_THROWS(std::invalid_argument, cpu::set_target("avx9"));
  CHECK(message.find("'avx9'") != std::string::npos);
  CHECK(message.find("baseline") != std::string::npos);
  CHECK(cpu::active_target() == before);
}
