#include "optim/step.hpp"

#include <cstring>

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
};

template <typename T>
T* at(void* array, std::int64_t index) {
  return static_cast<T*>(array) + index;
}
const void* grad_at(const StepArrays& arrays, std::int64_t index) {
  const std::int64_t bytes = item_bytes(arrays.grad_dtype);
  return static_cast<const char*>(arrays.grad) + index * bytes;
}

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
      tile(begin, end - begin, nullptr);
      return;
    }
    Tiles tiles;
    for (std::int64_t start = begin; start < end; start += kTileNumel) {
      const std::int64_t numel = end - start < kTileNumel ? end - start : kTileNumel;
      if (is_elsewhere()) bring(start, numel);
      tile(start, numel, &tiles);
    }
  }

 private:
  bool needs_tiles() const {
    return arrays_.param_dtype != Dtype::kFloat32 || arrays_.grad_dtype == Dtype::kFloat16;
  }

  bool is_elsewhere() const { return arrays_.param_origin != 0 || arrays_.record_origin != 0; }

  // The old values of elements that begin on a multiple of kScaleBlockNumel, to where the new ones will be.
  void bring(std::int64_t start, std::int64_t numel) const {
    const auto copy = [](void* array, std::int64_t offset, std::int64_t nbytes, std::ptrdiff_t origin) {
      char* const target = static_cast<char*>(array) + offset;
      std::memcpy(target, target + origin, static_cast<std::size_t>(nbytes));
    };
    if (arrays_.param_origin != 0) {
      const std::int64_t bytes = item_bytes(arrays_.param_dtype);
      copy(arrays_.param, start * bytes, numel * bytes, arrays_.param_origin);
    }
    if (arrays_.record_origin == 0) return;
    if (arrays_.param_dtype != Dtype::kFloat32) {
      const std::int64_t bytes = arrays_.param_dtype == Dtype::kBfloat16 ? 2 : 4;
      copy(arrays_.companion, start * bytes, numel * bytes, arrays_.record_origin);
    }
    for (int i = 0; i < rule_.num_moments; ++i) {
      const std::int64_t bytes = moment_bytes(arrays_.moment_format);
      copy(arrays_.moments.values[i], start * bytes, numel * bytes, arrays_.record_origin);
      if (arrays_.moments.exponents[i] != nullptr) {
        copy(arrays_.moments.exponents[i], start / kScaleBlockNumel,
             (numel + kScaleBlockNumel - 1) / kScaleBlockNumel, arrays_.record_origin);
      }
    }
  }

  void tile(std::int64_t start, std::int64_t numel, Tiles* tiles) const {
    const void* grad = grad_at(arrays_, start);
    Dtype grad_dtype = arrays_.grad_dtype;
    if (grad_dtype == Dtype::kFloat16) {
      kernels_.widen[static_cast<int>(grad_dtype)](grad, tiles->grad, numel);
      grad = tiles->grad;
      grad_dtype = Dtype::kFloat32;
    }
    MasterArrays masters{};
    MasterFormat format = MasterFormat::kInPlace;
    switch (arrays_.param_dtype) {
      case Dtype::kFloat32:
        masters.masters = at<float>(arrays_.param, start);
        break;
      case Dtype::kBfloat16:
        format = MasterFormat::kSplit;
        masters = {tiles->masters, at<std::uint16_t>(arrays_.param, start),
                   at<std::int16_t>(arrays_.companion, start)};
        break;
      case Dtype::kFloat16:
        masters.masters = at<float>(arrays_.companion, start);
        break;
    }
    const ApplyRule apply = rule_.apply[static_cast<int>(format)][static_cast<int>(grad_dtype)]
                                       [static_cast<int>(arrays_.moment_format)];
    apply(masters, moments_from(start), grad, numel, scalars_,
          static_cast<std::uint32_t>(first_index_ + start), seed_);
    write_params(start, numel, masters.masters);
  }

  void write_params(std::int64_t start, std::int64_t numel, const float* masters) const {
    switch (arrays_.param_dtype) {
      case Dtype::kFloat32:
        return;
      case Dtype::kBfloat16:
        kernels_.split(masters, at<std::uint16_t>(arrays_.param, start),
                       at<std::int16_t>(arrays_.companion, start), numel);
        return;
      case Dtype::kFloat16:
        kernels_.narrow[static_cast<int>(Dtype::kFloat16)](masters, at<std::uint16_t>(arrays_.param, start),
                                                           numel);
        return;
    }
  }

  MomentArrays moments_from(std::int64_t start) const {
    MomentArrays moments = arrays_.moments;
    for (int i = 0; i < rule_.num_moments; ++i) {
      moments.values[i] = at<char>(moments.values[i], start * moment_bytes(arrays_.moment_format));
      if (moments.exponents[i] != nullptr) moments.exponents[i] += start / kScaleBlockNumel;
    }
    return moments;
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
    check_arguments({{"companion", arrays.companion, arrays.param_dtype == Dtype::kBfloat16 ? 2 : 4}}, numel);
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
