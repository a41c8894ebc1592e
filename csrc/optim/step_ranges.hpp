#pragma once

// A rule's step over a range of any dtypes, in place or beside the old values, around the rule's own loops.

// What is not kept as float32 goes through tiles that stay in the first-level cache: widened, stepped,
// narrowed.
constexpr Index kTileNumel = 1024;

// [Note: Beside the old values]
// An ordinary store to a new place first reads that place's cache line. So old values are copied to a tile,
// stepped there, and written past the cache where the CPU can: memory then carries no more bytes than in
// place. The tile is so short that reads of the next one begin while this one's writes are on their way: with
// 128 elements a step took 1.2 times as long as in place, with 256 or 1024 2.4 times (AMD EPYC).
constexpr Index kTileBesideNumel = kScaleBlockNumel;

struct Scratch {
  alignas(64) float grad[kTileNumel];
  alignas(64) float masters[kTileNumel];
};

inline Index item_bytes(Dtype dtype) { return kItemBytes[static_cast<int>(dtype)]; }
inline Index companion_bytes(Dtype param_dtype) { return kCompanionBytes[static_cast<int>(param_dtype)]; }
inline Index moment_bytes(MomentFormat format) { return kMomentBytes[static_cast<int>(format)]; }

inline void* after(void* array, Index nbytes) {
  return array == nullptr ? nullptr : static_cast<char*>(array) + nbytes;
}

// The arrays from an element on that begins a block of scales.
inline StepArrays rest_of(StepArrays arrays, Index start) {
  arrays.param = after(arrays.param, start * item_bytes(arrays.param_dtype));
  arrays.companion = after(arrays.companion, start * companion_bytes(arrays.param_dtype));
  arrays.grad = static_cast<const char*>(arrays.grad) + start * item_bytes(arrays.grad_dtype);
  for (int i = 0; i < kMaxMoments; ++i) {
    arrays.moments.values[i] = after(arrays.moments.values[i], start * moment_bytes(arrays.moment_format));
    if (arrays.moments.exponents[i] != nullptr) arrays.moments.exponents[i] += start / kScaleBlockNumel;
  }
  return arrays;
}

// What all tiles of a range share.
struct RangeStep {
  const RuleEntry& rule;
  const float* scalars;
  std::uint32_t seed;

  // In place; `scratch` may be null for float32 parameters with gradients that the rule reads itself.
  void operator()(const StepArrays& arrays, Index numel, std::uint32_t index, Scratch* scratch) const {
    const void* grad = arrays.grad;
    Dtype grad_dtype = arrays.grad_dtype;
    if (grad_dtype == Dtype::kFloat16) {
      widen<Fp16>(grad, scratch->grad, numel);
      grad = scratch->grad;
      grad_dtype = Dtype::kFloat32;
    }
    auto* const param = static_cast<std::uint16_t*>(arrays.param);
    auto* const remainder = static_cast<std::int16_t*>(arrays.companion);
    MasterArrays masters{static_cast<float*>(arrays.param), nullptr, nullptr};
    MasterFormat format = MasterFormat::kInPlace;
    if (arrays.param_dtype == Dtype::kBfloat16) {
      masters = {scratch->masters, param, remainder};
      format = MasterFormat::kSplit;
    } else if (arrays.param_dtype == Dtype::kFloat16) {
      masters.masters = static_cast<float*>(arrays.companion);
    }
    rule.apply[static_cast<int>(format)][static_cast<int>(grad_dtype)][static_cast<int>(
        arrays.moment_format)](masters, arrays.moments, grad, numel, scalars, index, seed);
    if (arrays.param_dtype == Dtype::kBfloat16) {
      split(masters.masters, param, remainder, numel);
    } else if (arrays.param_dtype == Dtype::kFloat16) {
      narrow<Fp16>(masters.masters, param, numel);
    }
  }
};

// Items of a whole tile are copied in a number of instructions that is known here.
inline void copy_to_tile(void* tile, const void* source, Index item, Index numel) {
  if (numel == kTileBesideNumel && item == 4) {
    __builtin_memcpy(tile, source, 4 * kTileBesideNumel);
  } else if (numel == kTileBesideNumel && item == 2) {
    __builtin_memcpy(tile, source, 2 * kTileBesideNumel);
  } else {
    __builtin_memcpy(tile, source, static_cast<std::size_t>(numel * item));
  }
}

// Past the cache if these are whole cache lines; else the CPU would have to read the rest of some.
inline void copy_home(void* target, const void* tile, Index nbytes) {
#if defined(ZEROOFFLOAD_VECTORS)
  if (reinterpret_cast<std::uintptr_t>(target) % 64 == 0 && nbytes % 64 == 0) {
    for (Index i = 0; i < nbytes; i += kVectorBytes)
      stream(static_cast<const char*>(tile) + i, after(target, i));
    return;
  }
#endif
  __builtin_memcpy(target, tile, static_cast<std::size_t>(nbytes));
}

// The states of a tile whose new values belong elsewhere: parameter, companion, moments and exponents.
class StatesInTile {
 public:
  // Points `arrays` at copies of the old values.
  StatesInTile(StepArrays& arrays, int num_moments, Index numel) : numel_(numel) {
    bring(arrays.param, item_bytes(arrays.param_dtype), arrays.param_origin);
    bring(arrays.companion, companion_bytes(arrays.param_dtype), arrays.record_origin);
    for (int i = 0; i < num_moments; ++i) {
      bring(arrays.moments.values[i], moment_bytes(arrays.moment_format), arrays.record_origin);
      if (arrays.moments.exponents[i] == nullptr || arrays.record_origin == 0) continue;
      exponent_homes_[i] = arrays.moments.exponents[i];
      exponents_[i] = exponent_homes_[i][arrays.record_origin];
      arrays.moments.exponents[i] = &exponents_[i];
    }
  }

  void take_home() const {
    for (int i = 0; i < num_states_; ++i) copy_home(states_[i].home, values_[i], states_[i].item * numel_);
    for (int i = 0; i < kMaxMoments; ++i) {
      if (exponent_homes_[i] != nullptr) *exponent_homes_[i] = exponents_[i];
    }
  }

 private:
  struct State {
    void* home;
    Index item;
  };

  void bring(void*& array, Index item, std::ptrdiff_t origin) {
    if (origin == 0 || item == 0) return;
    copy_to_tile(values_[num_states_], after(array, origin), item, numel_);
    states_[num_states_] = {array, item};
    array = values_[num_states_++];
  }

  alignas(64) float values_[2 + kMaxMoments][kTileBesideNumel];
  State states_[2 + kMaxMoments];
  std::uint8_t* exponent_homes_[kMaxMoments] = {};
  std::uint8_t exponents_[kMaxMoments];
  Index numel_;
  int num_states_ = 0;
};

// Elements [begin, end), which begin on a block of scales; the first of all has `index`.
void step_range(const RuleEntry& rule, const StepArrays& whole, Index begin, Index end, const float* scalars,
                std::uint32_t index, std::uint32_t seed) {
  const RangeStep step{rule, scalars, seed};
  const bool is_beside = whole.param_origin != 0 || whole.record_origin != 0;
  const bool needs_scratch = whole.param_dtype != Dtype::kFloat32 || whole.grad_dtype == Dtype::kFloat16;
  if (!is_beside && !needs_scratch) {
    step(rest_of(whole, begin), end - begin, index + static_cast<std::uint32_t>(begin), nullptr);
    return;
  }
  Scratch scratch;
  const Index most = is_beside ? kTileBesideNumel : kTileNumel;
  for (Index start = begin; start < end; start += most) {
    const Index numel = end - start < most ? end - start : most;
    StepArrays arrays = rest_of(whole, start);
    const std::uint32_t first = index + static_cast<std::uint32_t>(start);
    if (is_beside) {
      const StatesInTile states(arrays, rule.num_moments, numel);
      step(arrays, numel, first, &scratch);
      states.take_home();
    } else {
      step(arrays, numel, first, &scratch);
    }
  }
#if defined(ZEROOFFLOAD_VECTORS)
  // What was written past the cache comes before whatever tells others that it is there.
  if (is_beside) _mm_sfence();
#endif
}
