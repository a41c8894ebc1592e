#pragma once

// Steps with 8-bit moments in vectors: the bits of the plain loops (step_block in kernels.cpp) in less than
// 0.6 of their time.
//
// [Note: A block is encoded while the next one is stepped]
// A step waits for the divider; encoding is integer work that could be done meanwhile, but a block's scale is
// known only when all of the block is stepped. So each round of the loop steps four vectors of one block and
// encodes four of the block before it. A CPU overlaps what is this near.

// Decoding and encoding multiply twice in the plain loops, as both factors' product may be no float. Here it
// has to be one. Left to the plain loops are blocks with scales of 2^15 (of any sign) or 2^31 and more, and
// NaN blocks.
template <Sign kSign>
inline bool has_one_factor(std::uint32_t exponent) {
  return exponent < 127 + Code<kSign>::kExponent;
}
template <Sign kSign>
inline float decoding_factor(std::uint32_t exponent) {
  return power_of_two(127 - Code<kSign>::kExponent + exponent);
}
template <Sign kSign>
inline Floats encoding_factor(Words exponents) {
  return float_of((127 + Code<kSign>::kExponent - exponents) << 23);
}

template <Sign kSign>
inline Floats decode(const std::uint8_t* codes, float factor) {
  if (kSign == Sign::kNonNegative) return float_of(load_bytes(codes) << kMantissaShift) * factor;
  return float_of((load_signed_bytes(codes) << kMantissaShift) & 0x87FFFFFFu) * factor;
}

// 12 bits each: a code that may be one above the largest, and the sign.
inline Words encode(const float* values, Floats factor, Words noise20) {
  return (bits_of(load_floats(values) * factor) + noise20) >> kMantissaShift;
}

// Four vectors of these 12 bits as bytes. Packing takes what is above 255 for 255.
template <Sign kSign>
inline Register pack(const Words (&codes)[4]) {
  Register low = ZEROOFFLOAD_INTRINSIC(packs_epi32)(raw(codes[0]), raw(codes[1]));
  Register high = ZEROOFFLOAD_INTRINSIC(packs_epi32)(raw(codes[2]), raw(codes[3]));
  if (kSign == Sign::kAny) {
    // Two bytes each: the code, at most 127 here, and 8 for a negative sign, which becomes 128.
    const Register limits = ZEROOFFLOAD_INTRINSIC(set1_epi16)(0x0F7F);
    const Register weights = ZEROOFFLOAD_INTRINSIC(set1_epi16)(16 << 8 | 1);
    low = ZEROOFFLOAD_INTRINSIC(maddubs_epi16)(ZEROOFFLOAD_INTRINSIC(min_epu8)(low, limits), weights);
    high = ZEROOFFLOAD_INTRINSIC(maddubs_epi16)(ZEROOFFLOAD_INTRINSIC(min_epu8)(high, limits), weights);
  }
  return in_order(ZEROOFFLOAD_INTRINSIC(packus_epi16)(low, high));
}

// As bits, to find the largest. What is never negative keeps its sign bit, which only a NaN can have set.
template <Sign kSign>
inline Words magnitudes(Floats values) {
  return kSign == Sign::kAny ? bits_of(values) & 0x7FFFFFFFu : bits_of(values);
}

// As exponent_of, which is theirs in all elements.
inline Words exponents_of(Words largest) { return larger(largest >> 23 & 0xFFu, Words{} + 1u); }

// Of what is not 0, code 0 becomes 1.
inline void lift_zeros(const float* source, std::uint8_t* target) {
  const float* const __restrict values = source;
  std::uint8_t* const __restrict codes = target;
  for (Index i = 0; i < kScaleBlockNumel; ++i) {
    const std::uint8_t least = bits_of(values[i]) == 0 ? 0 : 1;
    codes[i] = codes[i] > least ? codes[i] : least;
  }
}

// The elements that are packed together.
constexpr Index kGroupNumel = 4 * kVectorNumel;

// Of a block's scales, each in all elements.
struct Exponents {
  Words first, second;
};

// Encodes a stepped block, group by group.
template <typename R>
class BlockEncoder {
 public:
  // `hash` is that of the first elements' noise.
  BlockEncoder(const float* firsts, const float* seconds, const KeptBlock<R>& block, Exponents exponents,
               Words hash)
      : firsts_(firsts),
        seconds_(seconds),
        first_codes_(block.first_codes),
        second_codes_(block.second_codes),
        first_factor_(encoding_factor<KeptBlock<R>::kFirst>(exponents.first)),
        second_factor_(encoding_factor<KeptBlock<R>::kSecond>(exponents.second)),
        hash_(hash) {}

  // The next group, whose first element is that.
  void group(Index start) {
    Words firsts[4], seconds[4];
    for (int i = 0; i < 4; ++i) {
      const Index at = start + i * kVectorNumel;
      const Words random = scrambled(hash_);
      hash_ += static_cast<std::uint32_t>(kVectorNumel) * kHashFactor;
      firsts[i] = encode(firsts_ + at, first_factor_, (random >> 12) & 0xFFFF0u);
      if constexpr (kTwo) seconds[i] = encode(seconds_ + at, second_factor_, (random << 4) & 0xFFFF0u);
    }
    write<kFirst>(firsts, first_codes_ + start);
    if constexpr (kTwo) write<kSecond>(seconds, second_codes_ + start);
  }

  void all() {
    for (Index start = 0; start < kScaleBlockNumel; start += kGroupNumel) group(start);
    finish();
  }

  // After the last group.
  void finish() {
    if (!has_zero_byte(smallest_)) return;
    if constexpr (kFirst == Sign::kNonNegative) lift_zeros(firsts_, first_codes_);
    if constexpr (kTwo && kSecond == Sign::kNonNegative) lift_zeros(seconds_, second_codes_);
  }

 private:
  static constexpr bool kTwo = KeptBlock<R>::kTwo;
  static constexpr Sign kFirst = KeptBlock<R>::kFirst, kSecond = KeptBlock<R>::kSecond;

  template <Sign kSign>
  void write(const Words (&codes)[4], std::uint8_t* target) {
    const Register packed = pack<kSign>(codes);
    if (kSign == Sign::kNonNegative) smallest_ = ZEROOFFLOAD_INTRINSIC(min_epu8)(smallest_, packed);
    store(packed, target);
  }

  const float *firsts_, *seconds_;
  std::uint8_t *first_codes_, *second_codes_;
  Floats first_factor_, second_factor_;
  Words hash_;
  Register smallest_ = ZEROOFFLOAD_INTRINSIC(set1_epi8)(-1);  // of codes that must be 0 only for 0
};

// Steps one block, encodes the one before it.
template <typename R, typename Masters, typename Grad>
inline Exponents step_and_encode(const MasterArrays& arrays, const Grad* grads, Index start,
                                 const typename R::Scalars& k, const KeptBlock<R>& block, float* firsts,
                                 float* seconds, BlockEncoder<R>& before) {
  using Kept = KeptBlock<R>;
  const Masters from(arrays, start);
  float* const masters = arrays.masters + start;
  const Grad* const grad = grads + start;
  const std::uint8_t *const first_codes = block.first_codes, *const second_codes = block.second_codes;
  const float first_factor = decoding_factor<Kept::kFirst>(*block.first_exponent);
  const float second_factor = decoding_factor<Kept::kSecond>(*block.second_exponent);
  Words first_largest = {}, second_largest = {};
// With AVX-512 these are all: the largest magnitudes then stay in registers.
#pragma GCC unroll 2
  for (Index group = 0; group < kScaleBlockNumel; group += kGroupNumel) {
    for (Index i = group; i < group + kGroupNumel; i += kVectorNumel) {
      Floats m = decode<Kept::kFirst>(first_codes + i, first_factor);
      Floats v = {};
      if constexpr (Kept::kTwo) v = decode<Kept::kSecond>(second_codes + i, second_factor);
      store(R::step(from.read_vector(masters, i), load_floats(grad + i), m, v, k), masters + i);
      store(m, firsts + i);
      first_largest = larger(first_largest, magnitudes<Kept::kFirst>(m));
      if constexpr (Kept::kTwo) {
        store(v, seconds + i);
        second_largest = larger(second_largest, magnitudes<Kept::kSecond>(v));
      }
    }
    before.group(group);
  }
  before.finish();
  return {exponents_of(largest_of(first_largest)), exponents_of(largest_of(second_largest))};
}

template <typename R>
inline bool has_one_factor(std::uint32_t first_exponent, std::uint32_t second_exponent) {
  using Kept = KeptBlock<R>;
  if (!has_one_factor<Kept::kFirst>(first_exponent)) return false;
  return !Kept::kTwo || has_one_factor<Kept::kSecond>(second_exponent);
}

// Steps whole blocks from `start` on, up to one that is left to the plain loops; returns where that is. No
// call stands in the loop: it would take the constants out of their registers.
template <typename R, typename Masters, typename Grad>
Index step_blocks(const MasterArrays& arrays, const MomentArrays& moments, const Grad* grad, Index start,
                  Index numel, const typename R::Scalars& scalars, std::uint32_t index, std::uint32_t seed) {
  const typename R::Scalars k = scalars;
  Words hash;
  for (int i = 0; i < kVectorNumel; ++i) hash[i] = hashed(index + static_cast<std::uint32_t>(i), seed);

  // Stands for the block before the first one.
  std::uint8_t codes[kMaxMoments][kScaleBlockNumel], exponents[kMaxMoments];
  alignas(64) float ones[kScaleBlockNumel];
  for (float& one : ones) one = 1.0f;
  const KeptBlock<R> nowhere({{codes[0], codes[1]}, {&exponents[0], &exponents[1]}}, 0);
  BlockEncoder<R> before(ones, ones, nowhere, {Words{} + 127u, Words{} + 127u}, hash);

  alignas(64) float stepped[2][kMaxMoments][kScaleBlockNumel];
  for (; start + kScaleBlockNumel <= numel; start += kScaleBlockNumel) {
    const KeptBlock<R> block(moments, start);
    if (!has_one_factor<R>(*block.first_exponent, *block.second_exponent)) break;
    auto& [firsts, seconds] = stepped[start / kScaleBlockNumel % 2];
    const Exponents found =
        step_and_encode<R, Masters, Grad>(arrays, grad, start, k, block, firsts, seconds, before);
    *block.first_exponent = static_cast<std::uint8_t>(found.first[0]);
    if (KeptBlock<R>::kTwo) *block.second_exponent = static_cast<std::uint8_t>(found.second[0]);
    if (!has_one_factor<R>(found.first[0], found.second[0])) {
      encode_block<R>(firsts, seconds, moments, start, kScaleBlockNumel, index, seed);
      return start + kScaleBlockNumel;
    }
    before = BlockEncoder<R>(firsts, seconds, block, found,
                             hash + static_cast<std::uint32_t>(start) * kHashFactor);
  }
  before.all();
  return start;
}
