// Many rows and a block of keys and values that all of them see, in numbers of 16 bits. Scores, weights before they are
// rounded, and what blocks add up to are float32. Keys lose what they have in common first, their mean: it may be far larger
// than what they differ by, and takes part in float32.
#pragma once

#include <algorithm>

#include "attend_block.h"

#if defined(__AVX512VNNI__)
#include "narrow_avx512.h"
#elif defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#include "narrow_neon.h"
#endif

namespace ingot {
namespace {

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
constexpr bool kHasNarrow = true;

// Relative error below 3e-6 for x from kLeast to 0, which weights of 16 bits do not see.
inline Vec short_share(Vec given) {
  const Vec x = at_least(given, kLeast);
  const Vec shifted = fused(x, 1.44269504f, Vec{} + 12582912.0f), n = shifted - 12582912.0f;
  const Vec r = fused(n, -0.693147181f, x), square = r * r;
  const Vec low = fused(r, 0.9999634f, Vec{} + 0.99999926f), high = fused(r, 0.16790907f, Vec{} + 0.50004359f);
  const Vec y = fused(fused(square, 0.04145861f, high), square, low);
  return std::bit_cast<Vec>(std::bit_cast<IntegerVec>(y) + (std::bit_cast<IntegerVec>(shifted) << 23));
}

inline Half largest_of(const Half* from, size_t count) {
  uint16_t most = 0;
  for (size_t i = 0; i < count; i++) most = std::max<uint16_t>(most, from[i].bits & 0x7fff);
  return {most};
}

// Packed queries of a tile, in 16 bits.
inline void narrow_queries(const Tile& tile, int rows, NarrowTile& narrow) {
  const int dim = narrow.dim;
  float row_values[NarrowTile::kMostDims] = {};
  for (int row = 0; row < rows; row++) {
    const float* from = tile.q + static_cast<size_t>(row / kRows * kRows) * dim + row % kRows;
    for (int d = 0; d < dim; d++) row_values[d] = from[static_cast<size_t>(d) * kRows];
    Narrow::put_query(row_values, row, narrow);
  }
}

inline void put_centre(const Half* k, int dim, NarrowTile& narrow) {
  for (int d = 0; d < dim; d += kVector) {
    Vec sum{};
    for (int key = 0; key < kKeyBlock; key++) sum += loaded<Vec>(k + static_cast<size_t>(key) * dim + d);
    stored(narrow.centre + d, sum * (1.0f / kKeyBlock));
  }
}

// The product of each row with the centre.
inline void put_common(const Tile& tile, int rows, int dim, NarrowTile& narrow) {
  for (int row = 0; row < rows; row += kRows) {
    const float* q = tile.q + static_cast<size_t>(row) * dim;
    // Several sums, which do not wait for each other.
    float sums[4][kRows] = {};
    for (int d = 0; d < dim; d += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        for (int a = 0; a < kRows; a++) sums[i][a] = fused(q[static_cast<size_t>(d + i) * kRows + a], narrow.centre[d + i], sums[i][a]);
    for (int a = 0; a < kRows; a++) narrow.common[row + a] = (sums[0][a] + sums[1][a]) + (sums[2][a] + sums[3][a]);
  }
}

// A row's scores become weights of 16 bits, as if the largest of the block were 0. Gives the largest and the weights' sum.
inline std::pair<float, float> weighed_narrow(const float* scores, const NarrowTile& narrow, Narrow::Number* weights) {
  Vec most = loaded<Vec>(scores);
#pragma GCC unroll 16
  for (int i = kVector; i < kKeyBlock; i += kVector) most = larger(most, loaded<Vec>(scores + i));
  const float top = joined(most, larger)[0];
  Vec sums[2] = {};
#pragma GCC unroll 8
  for (int i = 0; i < kKeyBlock; i += 2 * kVector) {
    const Vec first = short_share(loaded<Vec>(scores + i) - top), second = short_share(loaded<Vec>(scores + i + kVector) - top);
    sums[0] += first;
    sums[1] += second;
    Narrow::put_weights(first, second, i, narrow, weights + i);
  }
  return {top, joined(sums[0] + sums[1], [](Vec a, Vec b) { return a + b; })[0]};
}

// A tile of rows meets a block of keys and values that all of them see. False, and nothing is done, where 16 bits do not
// hold the block.
inline bool meet_narrow(const Tile& tile, int rows, const Half* k, const Half* v, float cap, NarrowTile& narrow, Found found) {
  const int dim = narrow.dim;
  const size_t size = static_cast<size_t>(kKeyBlock) * dim;
  if (!Narrow::holds(largest_of(k, size), largest_of(v, size))) return false;
  put_centre(k, dim, narrow);
  const float off = Narrow::put_block(k, v, dim, narrow);
  put_common(tile, rows, dim, narrow);
  // Rows whose scores would not be near enough get those of float32.
  const auto near = [&](int row) { return narrow.reach[row] * off <= Narrow::kReach; };
  int close = 0;
  for (int row = 0; row < rows; row++) close += near(row);
  if (close < rows) scored_together(tile.q, rows, k, 0, kKeyBlock, dim, tile.panel, tile.scores);
  in_fours(rows, [&](int first, auto count) {
    constexpr int R = decltype(count)::value;
    alignas(64) float scores[R * kKeyBlock];
    alignas(64) Narrow::Number weights[R * kKeyBlock];
    float before[R], now[R];
    if (close > 0) Narrow::scores<R>(narrow, first, scores);
    for (int a = 0; a < R; a++) {
      const int row = first + a;
      float *own = near(row) ? scores + a * kKeyBlock : tile.scores + static_cast<size_t>(row) * kKeyBlock;
      float common = near(row) ? narrow.common[row] : 0.0f;
      if (cap > 0) {
        for (int i = 0; i < kKeyBlock; i += kVector) stored(own + i, capped(loaded<Vec>(own + i) + common, cap));
        common = 0;
      }
      const auto [top, sum] = weighed_narrow(own, narrow, weights + a * kKeyBlock);
      const float largest = found.largest[row], most = std::max(largest, top + common);
      before[a] = most == largest ? 1.0f : share(largest - most);
      now[a] = share(top + common - most);
      found.largest[row] = most;
      found.total[row] = fused(found.total[row], before[a], sum * now[a]);
    }
    Narrow::sum_up<R>(narrow, weights, v, dim, before, now, found.sums + static_cast<size_t>(first) * dim);
  });
  return true;
}

#else
constexpr bool kHasNarrow = false;

inline void narrow_queries(const Tile&, int, NarrowTile&) {}
inline bool meet_narrow(const Tile&, int, const Half*, const Half*, float, NarrowTile&, Found) { return false; }
#endif

}  // namespace
}  // namespace ingot
