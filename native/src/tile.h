// Products of a tile of weights, with a scale and a bias for each group of columns.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "block.h"

namespace ingot {
namespace {  // each instruction set has its own

// The bias of each row of a tile, as the stored quanta need it.
template <int Bits, class Factor>
inline Sum bias_of(const Factor* biases, Sum scale) {
  return Bits == 8 && kSignedBytes ? plus(load(biases), scale, 128.0f) : load(biases);
}

// Weights are waited for: they are asked for that many bytes ahead, beyond the end of a page too, where the processor itself
// stops looking ahead.
constexpr size_t kAhead = 2048;

// The products of those steps of a block in which there are rests, of N rows of a lot from the mth on.
template <int M, int N, int Bits>
inline void add_rests(const Quantised& x, unsigned marks, const uint8_t* quanta, size_t at, int m, Ints* found) {
  if (marks == 0) return;
  Ints sums[N];  // not those found, which then stay in registers where there are no rests
  std::copy_n(found, N, sums);
  for (; marks != 0; marks &= marks - 1) {
    const int step = std::countr_zero(marks);
    Block<Bits>::template add_rests<M, N>(quanta, step, x.rests + at * kBlock + 4 * (step * M + m), sums);
  }
  std::copy_n(sums, N, found);
}

// One tile of weights and the M activation rows of a lot, with the sums in registers over the whole width. What becomes of a
// row does not depend on M.
template <int M, int Bits, class Factor>
class Tile {
 public:
  Tile(const PackedMatrix& w, const Quantised& x, int n)
      : x_(x), blocks_(w.blocks()), groups_(w.groups()), per_group_(w.group / kBlock),
        quanta_(w.quanta + static_cast<size_t>(n / kTile) * blocks_ * kBytes),
        scales_(static_cast<const Factor*>(w.scales) + static_cast<size_t>(n) * groups_),
        biases_(static_cast<const Factor*>(w.biases) + static_cast<size_t>(n) * groups_) {}

  void multiply(Sum* sums) const {
#if defined(__ARM_FEATURE_DOTPROD)
    if constexpr (std::is_same_v<Factor, Half> && (Bits == 4 || Bits == 8))
      if (std::has_single_bit(static_cast<unsigned>(per_group_))) {
        alignas(16) float found[M * kTile];
        lot_products<M, Bits>(quanta_, scales_, biases_, per_group_, x_, blocks_, found);
        for (int m = 0; m < M; m++) sums[m] = load(found + m * kTile);
        return;
      }
#endif
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sums[m] = zero();
    const uint8_t* quanta = quanta_;
    for (int group = 0, block = 0; group < groups_; group++) {
      const Sum scale = load(scales_ + group * kTile);
      for (int end = block + per_group_; block < end; block++, quanta += kBytes) {
        for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(quanta + kAhead + line);
        add_block(quanta, static_cast<size_t>(block) * M, scale, sums);
      }
      const Sum bias = bias_of<Bits>(biases_ + group * kTile, scale);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums[m] = plus(sums[m], bias, x_.sums[group * M + m]);
    }
  }

 private:
  static constexpr size_t kBytes = kTile * kBlock * Bits / 8;  // of a block

  void add_block(const uint8_t* quanta, size_t at, Sum scale, Sum* sums) const {
    constexpr int kTogether = std::min(M, kMostTogether);
    const Block<Bits> weights(quanta);
#pragma GCC unroll 2
    for (int m = 0; m < M; m += kTogether) {
      Ints found[kTogether];
      weights.template products<M, kTogether>(x_.values + at * kBlock + 4 * m, found);
      add_rests<M, kTogether, Bits>(x_, x_.marks[at], quanta, at, m, found);
      Sum numbers[kTogether];
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; i++) numbers[i] = scaled(found[i], scale);
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; i++) sums[m + i] = plus(sums[m + i], numbers[i], x_.scales[at + m + i]);
    }
  }

  const Quantised& x_;
  int blocks_, groups_, per_group_;
  const uint8_t* quanta_;
  const Factor *scales_, *biases_;
};

}  // namespace
}  // namespace ingot
