#pragma once

// Vectors of AVX2 and AVX-512, for the loops of which compilers make less than there is. The compilers' own
// vector types have operators that do to each element what they do to a number; intrinsics stand for the
// rest.

#if defined(__AVX512BW__)
constexpr Index kVectorBytes = 64;
using Register = __m512i;
#define ZEROOFFLOAD_INTRINSIC(name) _mm512_##name
#else
constexpr Index kVectorBytes = 32;
using Register = __m256i;
#define ZEROOFFLOAD_INTRINSIC(name) _mm256_##name
#endif
constexpr Index kVectorNumel = kVectorBytes / 4;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef double Doubles __attribute__((vector_size(kVectorBytes)));

inline Floats float_of(Words bits) { return reinterpret_cast<Floats>(bits); }
inline Words bits_of(Floats values) { return reinterpret_cast<Words>(values); }
inline Register raw(Words words) { return reinterpret_cast<Register>(words); }

template <typename Vector>
inline void store(Vector vector, void* address) {
  __builtin_memcpy(address, &vector, sizeof vector);
}

// Past the cache, to a multiple of kVectorBytes.
inline void stream(const void* source, void* address) {
  Register bytes;
  __builtin_memcpy(&bytes, source, sizeof bytes);
#if defined(__AVX512BW__)
  _mm512_stream_si512(static_cast<__m512i*>(address), bytes);
#else
  _mm256_stream_si256(static_cast<__m256i*>(address), bytes);
#endif
}

inline Words larger(Words left, Words right) { return left > right ? left : right; }

// With `maskz` and a full mask: of the plain intrinsics GCC 12 warns that they read what is not set.
#if defined(__AVX512BW__)

inline Words load_bytes(const std::uint8_t* address) {
  return reinterpret_cast<Words>(
      _mm512_maskz_cvtepu8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(address))));
}
inline Words load_signed_bytes(const std::uint8_t* address) {
  return reinterpret_cast<Words>(
      _mm512_maskz_cvtepi8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(address))));
}
inline Words load_halves(const void* address) {
  return reinterpret_cast<Words>(
      _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(static_cast<const __m256i*>(address))));
}
inline Words load_signed_halves(const void* address) {
  return reinterpret_cast<Words>(
      _mm512_maskz_cvtepi16_epi32(0xFFFF, _mm256_loadu_si256(static_cast<const __m256i*>(address))));
}
inline Floats square_root(Floats values) {
  return reinterpret_cast<Floats>(_mm512_maskz_sqrt_ps(0xFFFF, reinterpret_cast<__m512>(values)));
}
inline Floats load_floats(const Fp16* address) {
  return reinterpret_cast<Floats>(
      _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address))));
}
inline void store_halves(Words words, void* address) {
  _mm256_storeu_si256(static_cast<__m256i*>(address), _mm512_maskz_cvtepi32_epi16(0xFFFF, raw(words)));
}
inline void store_as_fp16(Floats values, void* address) {
  _mm256_storeu_si256(
      static_cast<__m256i*>(address),
      _mm512_maskz_cvtps_ph(0xFFFF, reinterpret_cast<__m512>(values), _MM_FROUND_TO_NEAREST_INT));
}
inline Doubles load_doubles(const float* address) {
  return reinterpret_cast<Doubles>(_mm512_maskz_cvtps_pd(0xFF, _mm256_loadu_ps(address)));
}
// In all elements of the result.
inline Words largest_of(Words words) {
  const auto larger_of = [](Words left, Register right) {
    return larger(left, reinterpret_cast<Words>(right));
  };
  words = larger_of(words, _mm512_maskz_shuffle_i64x2(0xFF, raw(words), raw(words), _MM_SHUFFLE(1, 0, 3, 2)));
  words = larger_of(words, _mm512_maskz_shuffle_i64x2(0xFF, raw(words), raw(words), _MM_SHUFFLE(2, 3, 0, 1)));
  words = larger_of(words, _mm512_maskz_shuffle_epi32(0xFFFF, raw(words), _MM_PERM_BADC));
  return larger_of(words, _mm512_maskz_shuffle_epi32(0xFFFF, raw(words), _MM_PERM_CDAB));
}
inline bool has_zero_byte(Register bytes) { return _mm512_testn_epi8_mask(bytes, bytes) != 0; }
// Packing works within 128 bits: of four vectors it leaves four numbers of each, four times.
inline Register in_order(Register packed) {
  const Register order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_maskz_permutexvar_epi32(0xFFFF, order, packed);
}

#else

inline Words load_bytes(const std::uint8_t* address) {
  return reinterpret_cast<Words>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(address))));
}
inline Words load_signed_bytes(const std::uint8_t* address) {
  return reinterpret_cast<Words>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(address))));
}
inline Words load_halves(const void* address) {
  return reinterpret_cast<Words>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(address))));
}
inline Words load_signed_halves(const void* address) {
  return reinterpret_cast<Words>(
      _mm256_cvtepi16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(address))));
}
inline Floats square_root(Floats values) {
  return reinterpret_cast<Floats>(_mm256_sqrt_ps(reinterpret_cast<__m256>(values)));
}
inline Floats load_floats(const Fp16* address) {
  return reinterpret_cast<Floats>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address))));
}
inline void store_halves(Words words, void* address) {
  const Register packed =
      _mm256_permute4x64_epi64(_mm256_packus_epi32(raw(words), raw(words)), _MM_SHUFFLE(3, 1, 2, 0));
  _mm_storeu_si128(static_cast<__m128i*>(address), _mm256_castsi256_si128(packed));
}
inline void store_as_fp16(Floats values, void* address) {
  _mm_storeu_si128(static_cast<__m128i*>(address),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
}
inline Doubles load_doubles(const float* address) {
  return reinterpret_cast<Doubles>(_mm256_cvtps_pd(_mm_loadu_ps(address)));
}
// In all elements of the result.
inline Words largest_of(Words words) {
  const auto larger_of = [](Words left, Register right) {
    return larger(left, reinterpret_cast<Words>(right));
  };
  words = larger_of(words, _mm256_permute4x64_epi64(raw(words), _MM_SHUFFLE(1, 0, 3, 2)));
  words = larger_of(words, _mm256_shuffle_epi32(raw(words), _MM_SHUFFLE(1, 0, 3, 2)));
  return larger_of(words, _mm256_shuffle_epi32(raw(words), _MM_SHUFFLE(2, 3, 0, 1)));
}
inline bool has_zero_byte(Register bytes) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())) != 0;
}
// Packing works within 128 bits: of four vectors it leaves four numbers of each, twice.
inline Register in_order(Register packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

#endif

inline Floats sign_of(Floats values) {
  const Floats ones = Floats{} + 1.0f;
  return values > 0.0f ? ones : values < 0.0f ? -ones : values;
}

// Of the formats that masters and gradients are kept in.
inline Floats load_floats(const float* address) {
  Floats values;
  __builtin_memcpy(&values, address, sizeof values);
  return values;
}
inline Floats load_floats(const Bf16* address) { return float_of(load_halves(address) << 16); }
inline Floats load_joined(const std::uint16_t* param, const std::int16_t* remainder) {
  return float_of((load_halves(param) << 16) + load_signed_halves(remainder));
}

// Returns what was stored; see round_to.
inline Floats store_rounded(Floats values, float* address) {
  store(values, address);
  return values;
}
inline Floats store_rounded(Floats values, Bf16* address) {
  const Words bits = bits_of(values);
  const Words rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const Words halves = (bits & 0x7FFFFFFFu) > 0x7F800000u ? Words{} + 0x7FC0u : rounded;
  store_halves(halves, address);
  return float_of(halves << 16);
}
inline Floats store_rounded(Floats values, Fp16* address) {
  store_as_fp16(values, address);
  return load_floats(address);
}
