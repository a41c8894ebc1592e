#include "optim/step.hpp"

#include <cstring>

#include "base/streaming_copy.hpp"
#include "optim/launch.hpp"

namespace zerooffload::optim {
namespace {

// What is not kept as float32 goes through tiles that stay in the first-level cache: widened, stepped,
// narrowed.
constexpr std::int64_t kTileNumel = 1024;

std::int64_t moment_bytes(MomentFormat format) {
  switch (format) {
    case MomentFormat::kFloat32:
      return 4;
    case MomentFormat::kBfloat16:
      return 2;
    case MomentFormat::kBlock8:
      return 1;
  }
  return 1;
}

struct Tiles {
  alignas(64) float grad[kTileNumel];
  alignas(64) float masters[kTileNumel];
  // Where states whose new values belong elsewhere are stepped: parameter, companion, moments and exponents.
  alignas(64) float states[2 + 2 * kMaxMoments][kTileNumel];
};

void* after(void* array, std::int64_t nbytes) { return static_cast<char*>(array) + nbytes; }
const void* after(const void* array, std::int64_t nbytes) { return static_cast<const char*>(array) + nbytes; }

std::int64_t companion_bytes(Dtype param_dtype) {
  switch (param_dtype) {
    case Dtype::kFloat32:
      return 0;
    case Dtype::kBfloat16:
      return 2;
    case Dtype::kFloat16:
      return 4;
  }
  return 0;
}

// The arrays' rest from an element on that begins a block.
StepArrays rest_of(StepArrays arrays, std::int64_t start) {
  arrays.param = after(arrays.param, start * item_bytes(arrays.param_dtype));
  arrays.companion = after(arrays.companion, start * companion_bytes(arrays.param_dtype));
  arrays.grad = after(arrays.grad, start * item_bytes(arrays.grad_dtype));
  for (int i = 0; i < kMaxMoments; ++i) {
    if (arrays.moments.values[i] == nullptr) continue;
    arrays.moments.values[i] = after(arrays.moments.values[i], start * moment_bytes(arrays.moment_format));
    if (arrays.moments.exponents[i] != nullptr) arrays.moments.exponents[i] += start / kScaleBlockNumel;
  }
  return arrays;
}

// The states of a tile whose new values belong elsewhere, while they are in the cache. So memory sees each
// old value read and each new one written, once; in place it sees no less.
class StatesInCache {
 public:
  // Points `arrays` at copies of the old values.
  StatesInCache(StepArrays& arrays, int num_moments, std::int64_t numel, Tiles& tiles) : tiles_(tiles) {
    bring(arrays.param, numel * item_bytes(arrays.param_dtype), arrays.param_origin);
    bring(arrays.companion, numel * companion_bytes(arrays.param_dtype), arrays.record_origin);
    for (int i = 0; i < num_moments; ++i) {
      bring(arrays.moments.values[i], numel * moment_bytes(arrays.moment_format), arrays.record_origin);
      if (arrays.moments.exponents[i] == nullptr) continue;
      bring(arrays.moments.exponents[i], (numel + kScaleBlockNumel - 1) / kScaleBlockNumel,
            arrays.record_origin);
    }
  }

  void write() const {
    for (int i = 0; i < num_states_; ++i) {
      streaming_copy(states_[i].home, tiles_.states[i], states_[i].nbytes);
    }
  }

 private:
  struct State {
    void* home;
    std::int64_t nbytes;
  };

  template <typename T>
  void bring(T*& array, std::int64_t nbytes, std::ptrdiff_t origin) {
    if (origin == 0 || nbytes == 0) return;
    states_[num_states_] = {array, nbytes};
    void* const copy = tiles_.states[num_states_++];
    std::memcpy(copy, after(static_cast<void*>(array), origin), static_cast<std::size_t>(nbytes));
    array = static_cast<T*>(copy);
  }

  Tiles& tiles_;
  State states_[2 + 2 * kMaxMoments] = {};
  int num_states_ = 0;
};

class Stepper {
 public:
  Stepper(const RuleEntry& rule, const KernelTable& kernels, const StepArrays& arrays, const float* scalars,
          std::int64_t first_index, std::uint32_t seed)
      : rule_(rule),
        kernels_(kernels),
        arrays_(arrays),
        scalars_(scalars),
        first_index_(first_index),
        seed_(seed) {}

  // Elements [begin, end), which begin on a block.
  void range(std::int64_t begin, std::int64_t end) const {
    if (!needs_tiles() && !is_elsewhere()) {
      step(rest_of(arrays_, begin), begin, end - begin, nullptr);
      return;
    }
    Tiles tiles;
    for (std::int64_t start = begin; start < end; start += kTileNumel) {
      const std::int64_t numel = end - start < kTileNumel ? end - start : kTileNumel;
      StepArrays arrays = rest_of(arrays_, start);
      if (is_elsewhere()) {
        const StatesInCache states(arrays, rule_.num_moments, numel, tiles);
        step(arrays, start, numel, &tiles);
        states.write();
      } else {
        step(arrays, start, numel, &tiles);
      }
    }
    if (is_elsewhere()) order_streaming_copies();
  }

 private:
  bool needs_tiles() const {
    return arrays_.param_dtype != Dtype::kFloat32 || arrays_.grad_dtype == Dtype::kFloat16;
  }

  bool is_elsewhere() const { return arrays_.param_origin != 0 || arrays_.record_origin != 0; }

  // In place, of arrays that begin with element `start`.
  void step(const StepArrays& arrays, std::int64_t start, std::int64_t numel, Tiles* tiles) const {
    const void* grad = arrays.grad;
    Dtype grad_dtype = arrays.grad_dtype;
    if (grad_dtype == Dtype::kFloat16) {
      kernels_.widen[static_cast<int>(grad_dtype)](grad, tiles->grad, numel);
      grad = tiles->grad;
      grad_dtype = Dtype::kFloat32;
    }
    auto* const param = static_cast<std::uint16_t*>(arrays.param);
    auto* const remainder = static_cast<std::int16_t*>(arrays.companion);
    MasterArrays masters{};
    MasterFormat format = MasterFormat::kInPlace;
    switch (arrays.param_dtype) {
      case Dtype::kFloat32:
        masters.masters = static_cast<float*>(arrays.param);
        break;
      case Dtype::kBfloat16:
        format = MasterFormat::kSplit;
        masters = {tiles->masters, param, remainder};
        break;
      case Dtype::kFloat16:
        masters.masters = static_cast<float*>(arrays.companion);
        break;
    }
    const ApplyRule apply = rule_.apply[static_cast<int>(format)][static_cast<int>(grad_dtype)]
                                       [static_cast<int>(arrays.moment_format)];
    apply(masters, arrays.moments, grad, numel, scalars_, static_cast<std::uint32_t>(first_index_ + start),
          seed_);
    switch (arrays.param_dtype) {
      case Dtype::kFloat32:
        break;
      case Dtype::kBfloat16:
        kernels_.split(masters.masters, param, remainder, numel);
        break;
      case Dtype::kFloat16:
        kernels_.narrow[static_cast<int>(Dtype::kFloat16)](masters.masters, param, numel);
        break;
    }
  }

  const RuleEntry& rule_;
  const KernelTable& kernels_;
  const StepArrays& arrays_;
  const float* scalars_;
  std::int64_t first_index_;
  std::uint32_t seed_;
};

void check(const RuleEntry& rule, const StepArrays& arrays, std::int64_t numel) {
  check_arguments({{"param", arrays.param, item_bytes(arrays.param_dtype)},
                   {"grad", arrays.grad, item_bytes(arrays.grad_dtype)}},
                  numel);
  if (arrays.param_dtype != Dtype::kFloat32) {
    check_arguments({{"companion", arrays.companion, companion_bytes(arrays.param_dtype)}}, numel);
  }
  for (int i = 0; i < rule.num_moments; ++i) {
    check_arguments({{"moment", arrays.moments.values[i], moment_bytes(arrays.moment_format)}}, numel);
    if (arrays.moment_format == MomentFormat::kBlock8) {
      check_arguments({{"exponents", arrays.moments.exponents[i], 1}}, numel);
    }
  }
}

}  // namespace

const RuleEntry& rule_entry(Rule rule) { return active_kernels().rules[static_cast<int>(rule)]; }

void step(ThreadPool& pool, Rule rule, const StepArrays& arrays, std::int64_t numel, const float* scalars,
          std::int64_t first_index, std::uint32_t seed) {
  const KernelTable& kernels = active_kernels();
  const RuleEntry& entry = kernels.rules[static_cast<int>(rule)];
  check(entry, arrays, numel);
  const Stepper stepper(entry, kernels, arrays, scalars, first_index, seed);
  launch(pool, numel, [&](std::int64_t begin, std::int64_t end) { stepper.range(begin, end); });
}

}  // namespace zerooffload::optim
