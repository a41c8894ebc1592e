#include "optim/exact_sum.hpp"

#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

namespace zerooffload::optim {
namespace {

using Word = std::uint64_t;
__extension__ using Words = unsigned __int128;

constexpr int kFractionBits = 52;
constexpr int kInfiniteExponent = 0x7ff;
constexpr Word kFraction = (Word{1} << kFractionBits) - 1;
constexpr Word kHidden = Word{1} << kFractionBits;
constexpr Word kSign = Word{1} << 63;

// All doubles are multiples of 2^-1074, the bit 0 of this number. The largest has bit 2097; 2^63 of them need
// 63 more.
constexpr int kNumWords = (2098 + 63 + 63) / 64 + 2;
using Fixed = std::array<Word, kNumWords>;

void add(Fixed& total, Words number, int position) {
  const int shift = position % 64;
  const Words low = number << shift;
  const Word high = shift == 0 ? 0 : static_cast<Word>(number >> (128 - shift));
  Word carry = 0;
  std::size_t word = static_cast<std::size_t>(position / 64);
  for (const Word part : {static_cast<Word>(low), static_cast<Word>(low >> 64), high}) {
    const Words sum = Words{total[word]} + part + carry;
    total[word++] = static_cast<Word>(sum);
    carry = static_cast<Word>(sum >> 64);
  }
  for (; carry != 0; ++word) carry = ++total[word] == 0 ? 1 : 0;
}

bool bit(const Fixed& number, int position) {
  return (number[static_cast<std::size_t>(position / 64)] >> (position % 64) & 1) != 0;
}

int highest_bit(const Fixed& number) {
  for (int position = kNumWords * 64 - 1; position > 0; --position) {
    if (bit(number, position)) return position;
  }
  return 0;
}

// The bits of a double are those of the number in units of 2^-1074, until its fraction has no room for all of
// them.
double rounded(const Fixed& number) {
  const int shift = highest_bit(number) - kFractionBits;
  Word bits = number[0];
  if (shift > 0) {
    Word significand = 0;
    for (int i = kFractionBits; i >= 0; --i) significand = significand << 1 | Word{bit(number, shift + i)};
    bool is_odd_or_more = (significand & 1) != 0;
    for (int i = 0; i < shift - 1 && !is_odd_or_more; ++i) is_odd_or_more = bit(number, i);
    if (bit(number, shift - 1) && is_odd_or_more) ++significand;
    // A significand that is rounded up to a power of two carries into the exponent.
    bits = (static_cast<Word>(shift) << kFractionBits) + significand;
  }
  const Word infinite = Word{kInfiniteExponent} << kFractionBits;
  if (bits > infinite) bits = infinite;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

double exact_sum(const double* values, std::int64_t numel) {
  // Of all numbers with one exponent the sum of the significands, of which 2^75 find room.
  std::vector<Words> significands(kInfiniteExponent, 0);
  bool is_infinite = false;
  for (std::int64_t i = 0; i < numel; ++i) {
    Word bits;
    std::memcpy(&bits, values + i, sizeof bits);
    const auto exponent = static_cast<int>(bits >> kFractionBits & kInfiniteExponent);
    if (exponent == kInfiniteExponent && (bits & kFraction) != 0)
      return std::numeric_limits<double>::quiet_NaN();
    if ((bits & kSign) != 0 && bits != kSign) throw std::invalid_argument("values: expected none below 0");
    if (exponent == kInfiniteExponent) {
      is_infinite = true;
      continue;
    }
    significands[static_cast<std::size_t>(exponent)] += (bits & kFraction) + (exponent == 0 ? 0 : kHidden);
  }
  if (is_infinite) return std::numeric_limits<double>::infinity();
  Fixed total{};
  for (int exponent = 0; exponent < kInfiniteExponent; ++exponent) {
    const Words number = significands[static_cast<std::size_t>(exponent)];
    if (number != 0) add(total, number, exponent == 0 ? 0 : exponent - 1);
  }
  return rounded(total);
}

}  // namespace zerooffload::optim
