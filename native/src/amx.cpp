// Products of many rows in register tiles: weights and activations are rounded to bfloat16, sums are float32.
#include "amx.h"

#include <algorithm>

#include "planes_avx512.h"

namespace ingot {
namespace {

constexpr int kSteps = kBlock / 4;
constexpr int kMostPairs = kWideMost / kTile / 2;
constexpr int kChunk = 18;  // blocks of columns whose activations stay in the first-level cache for all panels

inline __m512 halves(const void* from, size_t at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + at)));
}

inline __m512 factors(const PackedMatrix& w, const void* from, size_t at) {
  return w.factors == Factors::halves ? halves(from, at) : _mm512_loadu_ps(static_cast<const float*>(from) + at);
}

// The scale and the bias of a group of columns for each of 16 rows.
struct Group {
  __m512 scale, bias;
};

inline __m512 numbers(__m512i integers) { return _mm512_cvtepi32_ps(integers); }

// Those of factors in two levels (see super.h): the nth group of a block of the part of columns whose factors begin at p.
inline Group super_group(int bits, const uint8_t* p, int block, int n) {
  const SuperForm form = super_form(bits);
  auto sixteen = [&](int which) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + kTile * form.unit_bytes() + kTile * (2 * block + which)));
  };
  const __m512 unit = halves(p, 0);
  if (!form.minima) {
    const __m512 scale = _mm512_mul_ps(unit, numbers(_mm512_cvtepi8_epi32(sixteen(n))));
    return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(-form.centre)))};
  }
  const __m512i first = _mm512_cvtepu8_epi32(sixteen(n));
  const __m512i scales = form.halved ? _mm512_and_si512(first, _mm512_set1_epi32(15)) : first;
  const __m512i minima = form.halved ? _mm512_srli_epi32(first, 4) : _mm512_cvtepu8_epi32(sixteen(1));
  return {_mm512_mul_ps(unit, numbers(scales)), _mm512_mul_ps(halves(p, kTile), numbers(_mm512_sub_epi32(_mm512_setzero_si512(), minima)))};
}

// Where the bits of a quantum are a float's fraction, from bit `At` on, and the exponent makes bit `At` worth one, the float
// is the quantum and what the exponent alone is worth.
constexpr int fraction_exponent(int at) { return (127 + 23 - at) << 23; }
constexpr float fraction_worth(int at) { return static_cast<float>(1 << (23 - at)); }

// Numbers become bfloat16 by leaving out half of their bits, so they are made larger first, by half a unit of the last
// bit that stays, on average. Those that need no rounding come out as they are.
constexpr float kEnlarged = 1.0026f;

// A scale for each of 16 rows, and what to add where quanta are fractions from the bits First and Second on.
template <int First, int Second>
struct Affine {
  explicit Affine(const Group& group) {
    const __m512 larger = _mm512_set1_ps(kEnlarged);
    scale = _mm512_mul_ps(group.scale, larger);
    const __m512 bias = _mm512_mul_ps(group.bias, larger);
    first = _mm512_fnmadd_ps(scale, _mm512_set1_ps(fraction_worth(First)), bias);
    second = _mm512_fnmadd_ps(scale, _mm512_set1_ps(fraction_worth(Second)), bias);
  }

  // Of the quanta with `Bits` bits each that begin at bit At of each lane.
  template <int At, int Bits>
  __m512 numbers(__m512i lanes) const {
    static_assert(At == First || At == Second);
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i mask = _mm512_set1_epi32(((1 << Bits) - 1) << At), exponent = _mm512_set1_epi32(fraction_exponent(At));
    const __m512 shifted = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(lanes, mask, exponent, kAndOr));
    return _mm512_fmadd_ps(shifted, scale, At == First ? first : second);
  }

  __m512 scale, first, second;
};

// Two columns of 16 rows as a row of a register tile: the two of one row side by side.
inline void put_pair(__m512 first, __m512 second, uint16_t* out) {
  constexpr int kAndOr = 0xea;
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  _mm512_store_si512(out, _mm512_ternarylogic_epi32(_mm512_castps_si512(second), high,
                                                    _mm512_srli_epi32(_mm512_castps_si512(first), 16), kAndOr));
}

// A block of columns of 16 rows as a register tile. Each lane has the bytes of one row.
inline void unpack_fours(const Group& group, const uint8_t* p, uint16_t* out) {
  const Affine<12, 16> affine(group);
  for (int step = 0; step < kSteps; step += 2, p += 64, out += 8 * kTile) {
    // Eight quanta a row: low halves of bytes are the first four columns, high halves the next. They begin at the bits
    // 0, 8, 16, 24 and 4, 12, 20, 28.
    const __m512i x = _mm512_loadu_si512(p);
    const __m512i up_8 = _mm512_slli_epi32(x, 8), up_12 = _mm512_slli_epi32(x, 12);
    const __m512i down_8 = _mm512_srli_epi32(x, 8), down_12 = _mm512_srli_epi32(x, 12);
    put_pair(affine.numbers<12, 4>(up_12), affine.numbers<16, 4>(up_8), out);
    put_pair(affine.numbers<16, 4>(x), affine.numbers<16, 4>(down_8), out + 2 * kTile);
    put_pair(affine.numbers<12, 4>(up_8), affine.numbers<12, 4>(x), out + 4 * kTile);
    put_pair(affine.numbers<12, 4>(down_8), affine.numbers<16, 4>(down_12), out + 6 * kTile);
  }
}

// The same of any width, with a group for each half of the block.
template <int Bits>
inline void unpack_bytes(const Group& first, const Group& second, const uint8_t* p, uint16_t* out) {
  __m512i w[kSteps];
  read_quanta<Bits, Vectors512>(p, w);
  const Affine<8, 8> before(first), after(second);
  for (int step = 0; step < kSteps; step++, out += 4 * kTile) {
    const Affine<8, 8>& affine = step < kSteps / 2 ? before : after;
    const __m512i x = w[step];
    put_pair(affine.numbers<8, 8>(_mm512_slli_epi32(x, 8)), affine.numbers<8, 8>(x), out);
    put_pair(affine.numbers<8, 8>(_mm512_srli_epi32(x, 8)), affine.numbers<8, 8>(_mm512_srli_epi32(x, 16)), out + 2 * kTile);
  }
}

inline void unpack_block(int bits, const Group& first, const Group& second, const uint8_t* p, uint16_t* out) {
  switch (bits) {
    case 2: return unpack_bytes<2>(first, second, p, out);
    case 3: return unpack_bytes<3>(first, second, p, out);
    case 4: return unpack_fours(first, p, out);
    case 5: return unpack_bytes<5>(first, second, p, out);
    case 6: return unpack_bytes<6>(first, second, p, out);
    default: return unpack_bytes<8>(first, second, p, out);
  }
}

// The 16 rows from `n` on: a panel, one register tile for each block of columns.
void unpack(const PackedMatrix& w, int n, uint16_t* out) {
  const int per_group = w.group / kBlock;
  const size_t block_bytes = kTile * w.block_bytes();
  const uint8_t* p = w.quanta + static_cast<size_t>(n / kTile) * w.blocks() * block_bytes;
  const uint8_t* super = static_cast<const uint8_t*>(w.scales) + static_cast<size_t>(n) * w.factor_bytes();
  for (int block = 0; block < w.blocks(); block++, p += block_bytes, out += kTileNumbers) {
    if (w.factors == Factors::super) {
      constexpr int kBlocks = kSuper / kBlock;
      const uint8_t* part = super + static_cast<size_t>(block / kBlocks) * kTile * super_form(w.bits).row_bytes();
      const Group first = super_group(w.bits, part, block % kBlocks, 0);
      const Group second = super_form(w.bits).halved ? super_group(w.bits, part, block % kBlocks, 1) : first;
      unpack_block(w.bits, first, second, p, out);
    } else {
      const size_t at = static_cast<size_t>(n) * w.groups() + static_cast<size_t>(block / per_group) * kTile;
      const Group group{factors(w, w.scales, at), factors(w, w.biases, at)};
      unpack_block(w.bits, group, group, p, out);
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

// Panels that are unpacked before they are multiplied: with few rows, two, which then are in the first-level cache still.
int panels_at_once(int all, WideRows x) { return x.count <= 2 * kTile ? 2 : all; }

void multiply(const WidePart& part, WideRows x, uint16_t* scratch, bool adds, float* y, size_t stride) {
  const int all = panels_of(part), together = panels_at_once(all, x);
  const size_t panel = static_cast<size_t>(kTile) * x.columns;
  for (int begin = 0; begin < all; begin += together) {
    const int count = std::min(together, all - begin);
    for (int i = 0; i < count; i++) unpack(part.w, part.first + (begin + i) * kTile, scratch + i * panel);
    each_product(x, scratch, count, [&](int m, int pair, const float* sums) {
      for (int j = 0; j < std::min(2, count - 2 * pair); j++) {
        const int n = part.first + (begin + 2 * pair + j) * kTile;
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
}

// silu(gate) * up. What it is rounded to has 8 bits.
inline __m512 gated(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1.0f), e = power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-kLog2e)));
  return _mm512_mul_ps(_mm512_mul_ps(gate, up), _mm512_rcp14_ps(_mm512_add_ps(one, e)));
}

void multiply_gated(const WidePart& gate, const WidePart& up, WideRows x, uint16_t* scratch, WideRows y) {
  const int all = panels_of(gate), together = std::max(1, panels_at_once(2 * all, x) / 2);
  const size_t panel = static_cast<size_t>(kTile) * x.columns;
  auto bias = [](const WidePart& part, int n) {
    return part.bias ? _mm512_loadu_ps(part.bias + n) : _mm512_setzero_ps();
  };
  for (int begin = 0; begin < all; begin += together) {
    const int count = std::min(together, all - begin), first = gate.first + begin * kTile;
    for (int i = 0; i < count; i++) {
      unpack(gate.w, first + i * kTile, scratch + 2 * i * panel);
      unpack(up.w, first + i * kTile, scratch + (2 * i + 1) * panel);
    }
    each_product(x, scratch, 2 * count, [&](int m, int pair, const float* sums) {
      const int n = first + pair * kTile;
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
}

void round(const float* x, int row, WideRows out) {
  uint16_t* to = out.values + static_cast<size_t>(row / kTile) * kTile * out.columns + row % kTile * kBlock;
  for (int k = 0; k < out.columns; k += kBlock, to += kTileNumbers)
    _mm512_storeu_si512(to, rounded(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + kTile)));
}

}  // namespace

template <class Number>
void attend_in_tiles(const Sight& how, const float* q, int queries, int group, size_t stride, const Paged<Number>& paged,
                     int keys, const float* sinks, float* out);

extern const Wide wide_amx;
const Wide wide_amx = {"amx", round, multiply, multiply_gated, attend_in_tiles<float>, attend_in_tiles<Half>};

}  // namespace ingot
