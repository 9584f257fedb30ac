// Compiled several times with different flags; INGOT_ISA names the result.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#define INGOT_NAME(name) INGOT_NAME_(name, INGOT_ISA)
#define INGOT_NAME_(name, isa) INGOT_NAME__(name, isa)
#define INGOT_NAME__(name, isa) name##_##isa
#define INGOT_TEXT(name) INGOT_TEXT_(name)
#define INGOT_TEXT_(name) #name

namespace ingot {
namespace {

constexpr int kSteps = kBlock / 4;  // a block is multiplied four columns at a time

// For each instruction set: `Sum` and `Ints` hold a number for each row of a tile, `Bytes` four quanta of each.
// `product` multiplies a block of weights with a block of activations.
#if defined(__ARM_FEATURE_DOTPROD)

constexpr int kTile = 4;
constexpr bool kSignedBytes = true;
using Sum = float32x4_t;
using Ints = int32x4_t;
using Bytes = int8x16_t;

inline Sum zero() { return vdupq_n_f32(0); }
inline Sum load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Sum sum) { vst1q_f32(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return vfmaq_n_f32(sum, a, b); }
inline Sum plus(Sum sum, Ints high, Ints low, Sum scales, float scale) {
  const Ints both = vaddq_s32(vshlq_n_s32(high, 8), low);
  return vfmaq_f32(sum, vcvtq_f32_s32(both), vmulq_n_f32(scales, scale));
}

template <int Bits>
struct Block {
  Bytes w[kSteps];

  explicit Block(const uint8_t* p) {
    if constexpr (Bits == 8) {
      for (int i = 0; i < kSteps; i++) w[i] = vreinterpretq_s8_u8(vld1q_u8(p + 16 * i));
    } else {
      for (int i = 0; i < kSteps / 2; i++) {
        const uint8x16_t q = vld1q_u8(p + 16 * i);
        w[2 * i] = vreinterpretq_s8_u8(vandq_u8(q, vdupq_n_u8(15)));
        w[2 * i + 1] = vreinterpretq_s8_u8(vshrq_n_u8(q, 4));
      }
    }
  }

  Ints product(const int8_t* x) const {
    const Bytes first = vld1q_s8(x), second = vld1q_s8(x + 16);
    // Two chains, as the latency of the products is what would hold one up.
    Ints a = vdotq_laneq_s32(vdupq_n_s32(0), w[0], first, 0), b = vdotq_laneq_s32(vdupq_n_s32(0), w[1], first, 1);
    a = vdotq_laneq_s32(a, w[2], first, 2);
    b = vdotq_laneq_s32(b, w[3], first, 3);
    a = vdotq_laneq_s32(a, w[4], second, 0);
    b = vdotq_laneq_s32(b, w[5], second, 1);
    a = vdotq_laneq_s32(a, w[6], second, 2);
    b = vdotq_laneq_s32(b, w[7], second, 3);
    return vaddq_s32(a, b);
  }
};

#elif defined(__AVX512VNNI__)

constexpr int kTile = 16;
constexpr bool kSignedBytes = false;
using Sum = __m512;
using Ints = __m512i;
using Bytes = __m512i;

inline Sum zero() { return _mm512_setzero_ps(); }
inline Sum load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Sum sum) { _mm512_storeu_ps(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), sum); }
inline Sum plus(Sum sum, Ints high, Ints low, Sum scales, float scale) {
  const Ints both = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), _mm512_mul_ps(scales, _mm512_set1_ps(scale)), sum);
}
inline Ints four(const int8_t* x) {
  int32_t both;
  std::memcpy(&both, x, sizeof(both));
  return _mm512_set1_epi32(both);
}

template <int Bits>
struct Block {
  Bytes w[kSteps];

  explicit Block(const uint8_t* p) {
    if constexpr (Bits == 8) {
      for (int i = 0; i < kSteps; i++) w[i] = _mm512_loadu_si512(p + 64 * i);
    } else {
      const Bytes mask = _mm512_set1_epi8(15);
      for (int i = 0; i < kSteps / 2; i++) {
        const Bytes q = _mm512_loadu_si512(p + 64 * i);
        w[2 * i] = _mm512_and_si512(q, mask);
        w[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(q, 4), mask);
      }
    }
  }

  Ints product(const int8_t* x) const {
    Ints a = _mm512_setzero_si512(), b = a;
#pragma GCC unroll 4
    for (int i = 0; i < kSteps; i += 2) {
      a = _mm512_dpbusd_epi32(a, w[i], four(x + 4 * i));
      b = _mm512_dpbusd_epi32(b, w[i + 1], four(x + 4 * i + 4));
    }
    return _mm512_add_epi32(a, b);
  }
};

#elif defined(__AVX2__)

constexpr int kTile = 8;
constexpr bool kSignedBytes = true;
using Sum = __m256;
using Ints = __m256i;
using Bytes = __m256i;

inline Sum zero() { return _mm256_setzero_ps(); }
inline Sum load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Sum sum) { _mm256_storeu_ps(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), sum); }
inline Sum plus(Sum sum, Ints high, Ints low, Sum scales, float scale) {
  const Ints both = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(both), _mm256_mul_ps(scales, _mm256_set1_ps(scale)), sum);
}
inline Ints four(const int8_t* x) {
  int32_t both;
  std::memcpy(&both, x, sizeof(both));
  return _mm256_set1_epi32(both);
}

template <int Bits>
struct Block {
  Bytes w[kSteps];

  explicit Block(const uint8_t* p) {
    if constexpr (Bits == 8) {
      for (int i = 0; i < kSteps; i++) w[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
    } else {
      const Bytes mask = _mm256_set1_epi8(15);
      for (int i = 0; i < kSteps / 2; i++) {
        const Bytes q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
        w[2 * i] = _mm256_and_si256(q, mask);
        w[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(q, 4), mask);
      }
    }
  }

  Ints product(const int8_t* x) const {
    const Ints ones = _mm256_set1_epi16(1);
    Ints sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; i++) {
      if constexpr (Bits == 4) {
        // Of 4 bits, the pairs of a whole block fit in 16 together.
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[i], four(x + 4 * i)));
      } else {
        // Signed times signed: the sign of the weight goes to the activation. |w| <= 128, so a pair fits in 16 bits.
        const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(four(x + 4 * i), w[i]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
      }
    }
    return Bits == 4 ? _mm256_madd_epi16(sum, ones) : sum;
  }
};

#else

constexpr int kTile = 4;
constexpr bool kSignedBytes = false;
struct Sum {
  float v[kTile];
};
struct Ints {
  int32_t v[kTile];
};

inline Sum zero() { return {}; }
inline Sum load(const float* p) {
  Sum sum;
  std::memcpy(sum.v, p, sizeof(sum.v));
  return sum;
}
inline void store(float* p, Sum sum) { std::memcpy(p, sum.v, sizeof(sum.v)); }
inline Sum plus(Sum sum, Sum a, float b) {
  for (int r = 0; r < kTile; r++) sum.v[r] += a.v[r] * b;
  return sum;
}
inline Sum plus(Sum sum, Ints high, Ints low, Sum scales, float scale) {
  for (int r = 0; r < kTile; r++)
    sum.v[r] += static_cast<float>(256 * high.v[r] + low.v[r]) * (scales.v[r] * scale);
  return sum;
}

template <int Bits>
struct Block {
  uint8_t w[kSteps][kTile][4];

  explicit Block(const uint8_t* p) {
    for (int i = 0; i < kSteps; i++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) {
          if constexpr (Bits == 8)
            w[i][r][t] = p[(i * kTile + r) * 4 + t];
          else
            w[i][r][t] = p[(i / 2 * kTile + r) * 4 + t] >> (i % 2 * 4) & 15;
        }
  }

  Ints product(const int8_t* x) const {
    Ints sum{};
    for (int i = 0; i < kSteps; i++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) sum.v[r] += w[i][r][t] * x[4 * i + t];
    return sum;
  }
};

#endif

// What 16 bits hold such that both halves fit in 8 signed ones: 256 * 127 + 127.
constexpr float kLargest = 32639.0f;

void quantise(const float* x, int columns, int group, Quantised out) {
  const int per_group = group / kBlock;
  for (int block = 0; block < columns / kBlock; block++, x += kBlock) {
    float largest = 0, sum = 0;
    for (int i = 0; i < kBlock; i++) {
      largest = std::fmax(largest, std::fabs(x[i]));
      sum += x[i];
    }
    float scale = largest / kLargest, inverse = largest > 0 ? kLargest / largest : 0;
    out.scales[block] = scale;
    out.sums[block / per_group] = block % per_group == 0 ? sum : out.sums[block / per_group] + sum;
    int8_t *high = out.high + block * kBlock, *low = out.low + block * kBlock;
    for (int i = 0; i < kBlock; i++) {
      int value = static_cast<int>(std::lrintf(x[i] * inverse));
      int top = (value + 128) >> 8;
      high[i] = static_cast<int8_t>(top);
      // -128 has no opposite in 8 bits, which one instruction set needs; being off by one there does not show.
      low[i] = static_cast<int8_t>(std::max(value - 256 * top, -127));
    }
  }
}

// One tile of weights times M activation rows, with the sums in registers over the whole width.
template <int M, int Bits>
void tile(const PackedMatrix& w, const Quantised& x, int n, int last, float* y, size_t stride) {
  const int blocks = w.blocks(), per_group = w.group / kBlock, groups = w.groups();
  const size_t block_bytes = kTile * w.block_bytes();
  const uint8_t* quanta = w.quanta + static_cast<size_t>(n / kTile) * blocks * block_bytes;
  const float *scales = w.scales + static_cast<size_t>(n) * groups, *biases = w.biases + static_cast<size_t>(n) * groups;
  Sum sums[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) sums[m] = zero();
  for (int group = 0, block = 0; group < groups; group++, scales += kTile, biases += kTile) {
    const Sum scale = load(scales), bias = load(biases);
    for (int end = block + per_group; block < end; block++, quanta += block_bytes) {
      const Block<Bits> weights(quanta);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const size_t at = static_cast<size_t>(m) * blocks + block;
        sums[m] = plus(sums[m], weights.product(x.high + at * kBlock), weights.product(x.low + at * kBlock), scale,
                       x.scales[at]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) sums[m] = plus(sums[m], bias, x.sums[static_cast<size_t>(m) * groups + group]);
  }
  const int used = std::min(kTile, last - n);
  for (int m = 0; m < M; m++) {
    if (used == kTile) {
      store(y + m * stride + n, sums[m]);
      continue;
    }
    float all[kTile];
    store(all, sums[m]);
    std::memcpy(y + m * stride + n, all, sizeof(float) * used);
  }
}

template <int Bits>
void multiply_bits(const PackedMatrix& w, Quantised x, int count, int first, int last, float* y, size_t stride) {
  auto advance = [&](int m) {
    const size_t blocks = static_cast<size_t>(m) * w.blocks();
    x.high += blocks * kBlock;
    x.low += blocks * kBlock;
    x.scales += blocks;
    x.sums += static_cast<size_t>(m) * w.groups();
    y += m * stride;
    count -= m;
  };
  for (; count >= 4; advance(4))
    for (int n = first; n < last; n += kTile) tile<4, Bits>(w, x, n, last, y, stride);
  for (; count >= 2; advance(2))
    for (int n = first; n < last; n += kTile) tile<2, Bits>(w, x, n, last, y, stride);
  for (; count >= 1; advance(1))
    for (int n = first; n < last; n += kTile) tile<1, Bits>(w, x, n, last, y, stride);
}

void multiply(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride) {
  if (w.bits == 4)
    multiply_bits<4>(w, x, count, first, last, y, stride);
  else
    multiply_bits<8>(w, x, count, first, last, y, stride);
}

template <int Bits>
void unpack_row(const PackedMatrix& w, int n, float* out) {
  const int per_group = w.group / kBlock, groups = w.groups(), row = n % kTile;
  const size_t block_bytes = kTile * w.block_bytes(), factors = static_cast<size_t>(n / kTile) * groups * kTile + row;
  const uint8_t* p = w.quanta + static_cast<size_t>(n / kTile) * w.blocks() * block_bytes + 4 * row;
  for (int block = 0; block < w.blocks(); block++, p += block_bytes, out += kBlock) {
    const size_t factor = factors + static_cast<size_t>(block / per_group) * kTile;
    const float scale = w.scales[factor], bias = w.biases[factor];
    if constexpr (Bits == 4) {
      for (int i = 0; i < kSteps / 2; i++)
        for (int t = 0; t < 4; t++) {
          const uint8_t both = p[4 * kTile * i + t];
          out[8 * i + t] = scale * static_cast<float>(both & 15) + bias;
          out[8 * i + 4 + t] = scale * static_cast<float>(both >> 4) + bias;
        }
    } else {
      for (int i = 0; i < kSteps; i++)
        for (int t = 0; t < 4; t++) {
          const uint8_t byte = p[4 * kTile * i + t];
          const int quantum = kSignedBytes ? static_cast<int8_t>(byte) : byte;
          out[4 * i + t] = scale * static_cast<float>(quantum) + bias;
        }
    }
  }
}

void unpack(const PackedMatrix& w, int first, int last, float* out) {
  for (int n = first; n < last; n++, out += w.columns) {
    if (w.bits == 4)
      unpack_row<4>(w, n, out);
    else
      unpack_row<8>(w, n, out);
  }
}

}  // namespace

extern const Kernels INGOT_NAME(kernels);
const Kernels INGOT_NAME(kernels) = {INGOT_TEXT(INGOT_ISA), kTile, kSignedBytes, quantise, multiply, unpack};

}  // namespace ingot
