// Products of many rows on machines with AMX: weights and activations are rounded to bfloat16, sums are float32.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace ingot {
namespace {

constexpr int kTile = 16;                           // rows of weights that lie together, and rows of a register tile
constexpr int kTileNumbers = kTile * kBlock;        // of weights in one register tile
constexpr int kSteps = kBlock / 4;

// Eight register tiles of 16 rows of 64 bytes: four sums, two of activations, two of weights.
struct alignas(64) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

class Tiles {
 public:
  Tiles() {
    static const Shape shape;
    // Not the intrinsic, before which gcc 12 may leave out the stores that fill the shape.
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { _tile_release(); }
};

inline __m512 factors(const PackedMatrix& w, const void* from, size_t at) {
  if (w.halves) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + at)));
  return _mm512_loadu_ps(static_cast<const float*>(from) + at);
}

// Quanta of 16 rows and four columns, a row in each lane, as two rows of a register tile: pairs of columns.
inline void unpack_step(__m512i quanta, __m512 scale, __m512 bias, uint16_t* out) {
  const __m512i byte = _mm512_set1_epi32(255);
  // From the first columns of all rows, then the second, to the two of one row side by side.
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  auto column = [&](__m512i shifted) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(shifted, byte)), scale, bias);
  };
  auto pair = [&](__m512 first, __m512 second, uint16_t* to) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
  };
  pair(column(quanta), column(_mm512_srli_epi32(quanta, 8)), out);
  pair(column(_mm512_srli_epi32(quanta, 16)), column(_mm512_srli_epi32(quanta, 24)), out + 2 * kTile);
}

// The 16 rows from `n` on, as one register tile for each block of columns.
void unpack(const PackedMatrix& w, int n, uint16_t* out) {
  const int per_group = w.group / kBlock;
  const size_t block_bytes = kTile * w.block_bytes();
  const uint8_t* p = w.quanta + static_cast<size_t>(n / kTile) * w.blocks() * block_bytes;
  const __m512i low = _mm512_set1_epi8(15);
  for (int block = 0; block < w.blocks(); block++, p += block_bytes, out += kTileNumbers) {
    const size_t at = static_cast<size_t>(n) * w.groups() + static_cast<size_t>(block / per_group) * kTile;
    const __m512 scale = factors(w, w.scales, at), bias = factors(w, w.biases, at);
    for (int step = 0; step < kSteps; step++) {
      uint16_t* to = out + step * 4 * kTile;
      if (w.bits == 8) {
        unpack_step(_mm512_loadu_si512(p + 64 * step), scale, bias, to);
      } else {
        const __m512i both = _mm512_loadu_si512(p + 64 * (step / 2));
        unpack_step(_mm512_and_si512(step % 2 == 0 ? both : _mm512_srli_epi16(both, 4), low), scale, bias, to);
      }
    }
  }
}

struct Place {
  float* y;
  size_t stride;
  int rows, columns;  // that are wanted of the 16 each
};

// `store(to, stride)` writes a register tile; which one must be a literal.
template <class Store>
inline void keep(Place place, const Store& store) {
  if (place.rows >= kTile && place.columns >= kTile) {
    store(place.y, place.stride * sizeof(float));
    return;
  }
  alignas(64) float all[kTile * kTile];
  store(all, kTile * sizeof(float));
  for (int m = 0; m < std::min(kTile, place.rows); m++)
    std::memcpy(place.y + m * place.stride, all + m * kTile, sizeof(float) * std::min(kTile, place.columns));
}

// M times 16 rows of activations with N times 16 rows of weights.
template <int M, int N>
void products(const uint16_t* x, size_t columns, const uint16_t* weights, int blocks, Place place) {
  const size_t row_bytes = columns * sizeof(uint16_t);
  const uint16_t *lower = x + kTile * columns, *second = weights + static_cast<size_t>(blocks) * kTileNumbers;
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (M == 2) _tile_zero(2);
  if constexpr (M == 2 && N == 2) _tile_zero(3);
  for (int block = 0; block < blocks; block++) {
    _tile_loadd(4, x + static_cast<size_t>(block) * kBlock, row_bytes);
    _tile_loadd(6, weights + static_cast<size_t>(block) * kTileNumbers, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, second + static_cast<size_t>(block) * kTileNumbers, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
      _tile_loadd(5, lower + static_cast<size_t>(block) * kBlock, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  const Place right{place.y + kTile, place.stride, place.rows, place.columns - kTile};
  const Place below{place.y + kTile * place.stride, place.stride, place.rows - kTile, place.columns};
  const Place beyond{below.y + kTile, place.stride, below.rows, right.columns};
  keep(place, [](float* to, size_t bytes) { _tile_stored(0, to, bytes); });
  if constexpr (N == 2) keep(right, [](float* to, size_t bytes) { _tile_stored(1, to, bytes); });
  if constexpr (M == 2) keep(below, [](float* to, size_t bytes) { _tile_stored(2, to, bytes); });
  if constexpr (M == 2 && N == 2) keep(beyond, [](float* to, size_t bytes) { _tile_stored(3, to, bytes); });
}

void multiply(const PackedMatrix& w, const uint16_t* x, int count, int first, int last, uint16_t* scratch, float* y,
              size_t stride) {
  const Tiles tiles;
  const int blocks = w.blocks(), panels = (last - first + kTile - 1) / kTile;
  const size_t panel = static_cast<size_t>(blocks) * kTileNumbers, columns = w.columns;
  for (int i = 0; i < panels; i++) unpack(w, first + i * kTile, scratch + i * panel);
  for (int m = 0; m < count; m += 2 * kTile) {
    const bool two = count - m > kTile;
    for (int i = 0; i < panels; i += 2) {
      const int n = first + i * kTile;
      const Place place{y + m * stride + n, stride, count - m, last - n};
      const auto use = panels - i > 1 ? (two ? products<2, 2> : products<1, 2>) : (two ? products<2, 1> : products<1, 1>);
      use(x + m * columns, columns, scratch + i * panel, blocks, place);
    }
  }
}

void round(const float* x, size_t size, uint16_t* out) {
  size_t i = 0;
  for (; i + 16 <= size; i += 16) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), rounded);
  }
}

}  // namespace

extern const Wide wide_amx;
const Wide wide_amx = {"amx", kTile, round, multiply};

}  // namespace ingot
