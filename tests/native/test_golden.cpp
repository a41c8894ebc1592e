// Fingerprints of results, the same on every architecture: x86-64 and 64-bit Arm must both come to these.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "check.hpp"
#include "optim/gradients.hpp"
#include "optim/launch.hpp"
#include "optim/master_weights.hpp"
#include "optim/step.hpp"
#include "settings.hpp"
#include "states.hpp"

using namespace zerooffload;
using optim::Arrival;
using states::Array;
using states::Fingerprint;
using states::State;

namespace {

const std::map<std::string, std::uint64_t> kGolden = {
    {"adagrad 8bit", 0x661BF295671D7865}, {"adagrad bf16", 0xAD341BBD2CE0CC9F},
    {"adagrad fp32", 0x3331F104FCB515F0}, {"adam 8bit", 0x950818B28F2A45F3},
    {"adam bf16", 0x44AC0AA9868A29EE},    {"adam fp32", 0xB59BDD95C9DBD988},
    {"adamw 8bit", 0xB27A41FD30C2051F},   {"adamw bf16", 0xC9264ED3C08E7806},
    {"adamw fp32", 0x148CA4007F2E7E4E},   {"lion 8bit", 0x60D9AD2756523D9C},
    {"lion bf16", 0x1D2954BC5CB29376},    {"lion fp32", 0xBEA04DFA0C7E3F6A},
    {"sgd 8bit", 0x0BF7C270FEC4CFD6},     {"sgd bf16", 0xEF74698ECBCD4964},
    {"sgd fp32", 0xA11F4BA5EEA3DEE3},     {"gradients", 0x33CD72F3A8F40D26},
    {"conversions", 0x90C0C1317084EF06},
};

constexpr std::int64_t kNumel = 4096 + 5 * 128 + 77;

// Fails with the lines that kGolden would need.
void check_golden(const std::map<std::string, Fingerprint>& results) {
  std::string wrong;
  for (const auto& [name, result] : results) {
    const auto known = kGolden.find(name);
    if (known != kGolden.end() && known->second == result.value()) continue;
    char line[100];
    std::snprintf(line, sizeof line, "\n    {\"%s\", 0x%016llX},", name.c_str(),
                  static_cast<unsigned long long>(result.value()));
    wrong += line;
  }
  if (!wrong.empty()) check::fail(__FILE__, __LINE__, cpu::target_name(cpu::active_target()) + wrong);
}

Array random_array(Dtype dtype, std::uint64_t seed) {
  Array array(states::kind_of(dtype), kNumel, 0);
  states::Numbers numbers(seed);
  for (std::int64_t i = 0; i < kNumel; ++i) array.set_float(i, numbers.number(-20, 10));
  return array;
}

}  // namespace

// Three steps for every type of parameter and gradient.
TEST(golden_steps) {
  for_each_target({1}, [](ThreadPool& pool) {
    std::map<std::string, Fingerprint> results;
    for (const states::Format& format : states::all_formats()) {
      State state = states::make_state(format, kNumel, 61);
      const std::vector<float> scalars = states::scalars_of(format.rule);
      for (std::uint32_t seed = 1; seed <= 3; ++seed) {
        optim::step(pool, format.rule, states::step_arrays(state), kNumel, scalars.data(), 1280, seed);
      }
      results[states::name_of(format.rule) + " " + states::name_of(format.moments)].add(state);
    }
    check_golden(results);
  });
}

TEST(golden_gradients) {
  for_each_target({1}, [](ThreadPool& pool) {
    Fingerprint result;
    for (const Dtype target_dtype : states::kDtypes) {
      for (const Dtype source_dtype : states::kDtypes) {
        if (target_dtype != Dtype::kFloat32 && target_dtype != source_dtype) continue;
        for (const Arrival arrival : {Arrival::kAdd, Arrival::kReplace}) {
          Array target = random_array(target_dtype, 67), source = random_array(source_dtype, 71);
          double sums[2];
          optim::arrive(pool, arrival, target.data(), target_dtype, source.data(), source_dtype, kNumel,
                        sums);
          result.add(target);
          result.add(sums, sizeof sums);
          optim::square_sums(pool, source.data(), source_dtype, kNumel, sums);
          result.add(sums, sizeof sums);
        }
      }
    }
    check_golden({{"gradients", result}});
  });
}

// Of all bits, so NaNs, with their payloads, are among them.
TEST(golden_conversions) {
  for_each_target({1}, [](ThreadPool& pool) {
    Fingerprint result;
    std::vector<std::uint32_t> floats;
    for (std::uint64_t bits = 0; bits < 0x100000000u; bits += 0xFFFF1)
      floats.push_back(static_cast<std::uint32_t>(bits));
    const auto numel = static_cast<std::int64_t>(floats.size());
    std::vector<std::uint16_t> narrow(floats.size());
    std::vector<std::int16_t> remainder(floats.size());
    std::vector<float> source(floats.size());
    std::memcpy(source.data(), floats.data(), floats.size() * sizeof(float));
    for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
      const auto& kernels = optim::active_kernels();
      std::vector<float> wide(floats.size());
      kernels.narrow[static_cast<int>(dtype)](source.data(), narrow.data(), numel);
      kernels.widen[static_cast<int>(dtype)](narrow.data(), wide.data(), numel);
      result.add(narrow.data(), narrow.size() * sizeof(std::uint16_t));
      result.add(wide.data(), wide.size() * sizeof(float));
    }
    optim::split_fp32(pool, source.data(), narrow.data(), remainder.data(), numel);
    result.add(narrow.data(), narrow.size() * sizeof(std::uint16_t));
    result.add(remainder.data(), remainder.size() * sizeof(std::int16_t));
    optim::join_fp32(pool, narrow.data(), remainder.data(), source.data(), numel);
    result.add(source.data(), source.size() * sizeof(float));
    check_golden({{"conversions", result}});
  });
}
