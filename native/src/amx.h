// What products and attention in register tiles share.
#pragma once

#include <immintrin.h>

#include "wide.h"

namespace ingot {

constexpr int kTile = kWideTile;                // rows of a register tile
constexpr int kTileNumbers = kTile * kBlock;    // of bfloat16 in one
constexpr int kTileSums = kTile * kTile;        // of float32 in one

// Eight register tiles of 16 rows of 64 bytes, until it goes out of scope: four for sums, two for each factor.
class Tiles {
 public:
  Tiles() {
    static const Shape shape;
    // Not the intrinsic, before which gcc 12 may leave out the stores that fill the shape.
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { _tile_release(); }

 private:
  struct alignas(64) Shape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

// Sums of M times 16 rows of the left factor with N times 16 columns of the right one, over `blocks` register tiles of
// each, which lie behind one another. The next rows are `below` numbers on, the next columns `beside`. They are added to
// `sums`, or begun `anew`; its four register tiles are those of the first rows, then of the next.
template <int M, int N>
inline void add_products(const uint16_t* left, size_t below, const uint16_t* right, size_t beside, int blocks, bool anew,
                         float* sums) {
  constexpr size_t kRow = kTile * sizeof(float);
  if (anew) {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (M == 2) _tile_zero(2);
    if constexpr (M == 2 && N == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kRow);
    if constexpr (N == 2) _tile_loadd(1, sums + kTileSums, kRow);
    if constexpr (M == 2) _tile_loadd(2, sums + 2 * kTileSums, kRow);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, sums + 3 * kTileSums, kRow);
  }
  for (int block = 0; block < blocks; block++, left += kTileNumbers, right += kTileNumbers) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, right + beside, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
      _tile_loadd(5, left + below, 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kRow);
  if constexpr (N == 2) _tile_stored(1, sums + kTileSums, kRow);
  if constexpr (M == 2) _tile_stored(2, sums + 2 * kTileSums, kRow);
  if constexpr (M == 2 && N == 2) _tile_stored(3, sums + 3 * kTileSums, kRow);
}

// The same for one or two of each.
inline void add_products(bool two_rows, bool two_columns, const uint16_t* left, size_t below, const uint16_t* right,
                         size_t beside, int blocks, bool anew, float* sums) {
  const auto use = two_rows ? (two_columns ? add_products<2, 2> : add_products<2, 1>)
                            : (two_columns ? add_products<1, 2> : add_products<1, 1>);
  use(left, below, right, beside, blocks, anew, sums);
}

// 32 numbers as bfloat16, those of `first` before those of `second`.
inline __m512i rounded(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// The same, of each two numbers side by side.
inline __m512i paired(__m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, rounded(first, second));
}

// 2 to the x, with a relative error below 3e-6; 0 far below, and for -infinity.
inline __m512 power_of_two(__m512 x) {
  constexpr int kDown = 9;
  const __m512 f = _mm512_reduce_ps(x, kDown);  // what is above the next whole number below
  __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.01353417f), _mm512_set1_ps(0.05201147f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.24144275f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.69300384f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(y, x);
}

// The first `count` lanes.
inline __mmask16 lanes(int count) {
  return static_cast<__mmask16>(count >= kTile ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

constexpr float kLog2e = 1.44269504f;

}  // namespace ingot
