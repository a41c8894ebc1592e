#include "base/streaming_copy.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zerooffload {

#if defined(__x86_64__)

namespace {

constexpr std::int64_t kLineBytes = 64;

}  // namespace

void streaming_copy(void* target, const void* source, std::int64_t nbytes) {
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  // Lines that are written whole only: of others the processor would have to read the rest.
  const auto past_line = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % kLineBytes);
  const std::int64_t head = std::min(nbytes, (kLineBytes - past_line) % kLineBytes);
  std::memcpy(to, from, static_cast<std::size_t>(head));
  std::int64_t done = head;
  for (; done + kLineBytes <= nbytes; done += kLineBytes) {
    for (std::int64_t part = 0; part < kLineBytes; part += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + done + part), bytes);
    }
  }
  std::memcpy(to + done, from + done, static_cast<std::size_t>(nbytes - done));
}

void order_streaming_copies() { _mm_sfence(); }

#else

void streaming_copy(void* target, const void* source, std::int64_t nbytes) {
  std::memcpy(target, source, static_cast<std::size_t>(nbytes));
}

void order_streaming_copies() {}

#endif

}  // namespace zerooffload
