#pragma once

// Gradients that arrive, in vectors: the sums of a short piece, then its squares. A CPU that waits for one
// piece's bytes does the arithmetic of another meanwhile, if both are near enough.

constexpr int kDoublesNumel = kVectorBytes / 8;
constexpr Index kShortPieceNumel = 256;

// A piece's numbers as floats: themselves, or what was left in `widened`.
inline const float* as_floats(const float* piece, const float*) { return piece; }
template <typename Other>
inline const float* as_floats(const Other*, const float* widened) {
  return widened;
}

// Whole pieces; returns how many elements these are.
template <Store kStore, typename Target, typename Source>
Index store_and_square_pieces(Target* targets, const Source* sources, Index numel, SquareSum& squares) {
  alignas(64) float widened[kShortPieceNumel];
  Doubles lanes[kNumLanes / kDoublesNumel];
  __builtin_memcpy(lanes, squares.lanes, sizeof lanes);
  Index start = 0;
  for (; start + kShortPieceNumel <= numel; start += kShortPieceNumel) {
    const Source* const source = sources + start;
    const float* floats = as_floats(source, widened);
    if constexpr (kStore == Store::kNothing) {
      if (floats == widened) {
        for (Index i = 0; i < kShortPieceNumel; i += kVectorNumel)
          store(load_floats(source + i), widened + i);
      }
    } else {
      Target* const target = targets + start;
      floats = as_floats(target, widened);
      for (Index i = 0; i < kShortPieceNumel; i += kVectorNumel) {
        Floats values = load_floats(source + i);
        if constexpr (kStore == Store::kSum) values = load_floats(target + i) + values;
        values = store_rounded(values, target + i);
        if (floats == widened) store(values, widened + i);
      }
    }
    for (Index i = 0; i < kShortPieceNumel; i += kNumLanes) {
      for (int lane = 0; lane < kNumLanes; lane += kDoublesNumel) {
        const Doubles values = load_doubles(floats + i + lane);
        lanes[lane / kDoublesNumel] += values * values;
      }
    }
  }
  __builtin_memcpy(squares.lanes, lanes, sizeof lanes);
  return start;
}
