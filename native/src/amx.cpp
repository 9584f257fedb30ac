// Products of many rows in register tiles: weights and activations are rounded to bfloat16, sums are float32.
#include "amx.h"

#include <algorithm>

namespace ingot {
namespace {

constexpr int kSteps = kBlock / 4;
constexpr int kMostPairs = kWideMost / kTile / 2;
constexpr int kChunk = 18;  // blocks of columns whose activations stay in the first-level cache for all panels

inline __m512 factors(const PackedMatrix& w, const void* from, size_t at) {
  if (w.halves) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + at)));
  return _mm512_loadu_ps(static_cast<const float*>(from) + at);
}

// Quanta of 16 rows and four columns, a row in each lane, as two rows of a register tile: pairs of columns.
inline void unpack_step(__m512i quanta, __m512 scale, __m512 bias, uint16_t* out) {
  const __m512i byte = _mm512_set1_epi32(255);
  auto column = [&](__m512i shifted) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(shifted, byte)), scale, bias);
  };
  _mm512_storeu_si512(out, paired(column(quanta), column(_mm512_srli_epi32(quanta, 8))));
  _mm512_storeu_si512(out + kBlock, paired(column(_mm512_srli_epi32(quanta, 16)), column(_mm512_srli_epi32(quanta, 24))));
}

// The 16 rows from `n` on: a panel, one register tile for each block of columns.
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

// use(m, pair, sums) for the rows from m on with each two panels of weights; sums as add_products has them.
template <class Use>
void each_product(WideRows x, const uint16_t* panels, int count, const Use& use) {
  const Tiles tiles;
  const int blocks = x.columns / kBlock, parts = (blocks + kChunk - 1) / kChunk, size = (blocks + parts - 1) / parts;
  const size_t panel = static_cast<size_t>(blocks) * kTileNumbers;
  alignas(64) float sums[kMostPairs][4 * kTileSums];
  for (int m = 0; m < x.count; m += 2 * kTile)
    for (int begin = 0; begin < blocks; begin += size) {
      const int some = std::min(size, blocks - begin);
      const uint16_t* rows = x.values + static_cast<size_t>(m) * x.columns + static_cast<size_t>(begin) * kTileNumbers;
      for (int i = 0; i < count; i += 2) {
        float* own = sums[parts == 1 ? 0 : i / 2];
        const uint16_t* weights = panels + i * panel + static_cast<size_t>(begin) * kTileNumbers;
        add_products(x.count - m > kTile, count - i > 1, rows, panel, weights, panel, some, begin == 0, own);
        if (begin + some == blocks) use(m, i / 2, own);
      }
    }
}

int panels_of(const WidePart& part) { return (part.last - part.first + kTile - 1) / kTile; }

void multiply(const WidePart& part, WideRows x, uint16_t* scratch, bool adds, float* y, size_t stride) {
  const int count = panels_of(part);
  const size_t panel = static_cast<size_t>(kTile) * x.columns;
  for (int i = 0; i < count; i++) unpack(part.w, part.first + i * kTile, scratch + i * panel);
  each_product(x, scratch, count, [&](int m, int pair, const float* sums) {
    for (int j = 0; j < std::min(2, count - 2 * pair); j++) {
      const int n = part.first + (2 * pair + j) * kTile;
      const __mmask16 wanted = lanes(part.last - n);
      const __m512 bias = part.bias ? _mm512_maskz_loadu_ps(wanted, part.bias + n) : _mm512_setzero_ps();
      for (int row = 0; row < std::min(2 * kTile, x.count - m); row++) {
        float* to = y + (m + row) * stride + n;
        __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + (row / kTile * 2 + j) * kTileSums + row % kTile * kTile), bias);
        if (adds) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(wanted, to));
        _mm512_mask_storeu_ps(to, wanted, sum);
      }
    }
  });
}

// silu(gate) * up. What it is rounded to has 8 bits.
inline __m512 gated(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1.0f), e = power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-kLog2e)));
  return _mm512_mul_ps(_mm512_mul_ps(gate, up), _mm512_rcp14_ps(_mm512_add_ps(one, e)));
}

void multiply_gated(const WidePart& gate, const WidePart& up, WideRows x, uint16_t* scratch, WideRows y) {
  const int count = panels_of(gate);
  const size_t panel = static_cast<size_t>(kTile) * x.columns;
  for (int i = 0; i < count; i++) {
    unpack(gate.w, gate.first + i * kTile, scratch + 2 * i * panel);
    unpack(up.w, up.first + i * kTile, scratch + (2 * i + 1) * panel);
  }
  auto bias = [](const WidePart& part, int n) {
    return part.bias ? _mm512_loadu_ps(part.bias + n) : _mm512_setzero_ps();
  };
  each_product(x, scratch, 2 * count, [&](int m, int pair, const float* sums) {
    const int n = gate.first + pair * kTile;
    const __m512 gate_bias = bias(gate, n), up_bias = bias(up, n);
    uint16_t* to = y.values + static_cast<size_t>(m) * y.columns + static_cast<size_t>(n / kBlock) * kTileNumbers + n % kBlock;
    for (int row = 0; row < std::min(2 * kTile, x.count - m); row++) {
      const float* own = sums + row / kTile * 2 * kTileSums + row % kTile * kTile;
      const __m512 g = _mm512_add_ps(_mm512_load_ps(own), gate_bias);
      const __m512 u = _mm512_add_ps(_mm512_load_ps(own + kTileSums), up_bias);
      uint16_t* at = to + static_cast<size_t>(row / kTile) * kTile * y.columns + row % kTile * kBlock;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(gated(g, u)));
    }
  });
}

void round(const float* x, int row, WideRows out) {
  uint16_t* to = out.values + static_cast<size_t>(row / kTile) * kTile * out.columns + row % kTile * kBlock;
  for (int k = 0; k < out.columns; k += kBlock, to += kTileNumbers)
    _mm512_storeu_si512(to, rounded(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + kTile)));
}

}  // namespace

void attend_in_tiles(const Sight& how, const float* q, int queries, int group, size_t stride, const float* k,
                     const float* v, int keys, const float* sinks, float* out);

extern const Wide wide_amx;
const Wide wide_amx = {"amx", round, multiply, multiply_gated, attend_in_tiles};

}  // namespace ingot
