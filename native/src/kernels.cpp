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

// A block of 32 weights in registers (of 8 bits with 128 taken off, so that they are signed), and its product with a block of activations. Each lane of a sum adds up some of
// the 32 products; where they end up does not matter, as they are all added in the end.
#if defined(__ARM_FEATURE_DOTPROD)

struct Sum {
  float32x4_t v = vdupq_n_f32(0);
  float total() const { return vaddvq_f32(v); }
};

struct Weights {
  int8x16_t a, b;

  static Weights four(const uint8_t* p) {
    uint8x16_t q = vld1q_u8(p);
    return {vreinterpretq_s8_u8(vandq_u8(q, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(q, 4))};
  }
  static Weights eight(const uint8_t* p) {
    uint8x16_t half = vdupq_n_u8(128);
    return {vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), half)), vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16), half))};
  }

  void add(Sum& sum, const int8_t* high, const int8_t* low, float scale) const {
    // Two chains, as the latency of the products is what would hold one up.
    int32x4_t h = vdotq_s32(vdotq_s32(vdupq_n_s32(0), a, vld1q_s8(high)), b, vld1q_s8(high + 16));
    int32x4_t l = vdotq_s32(vdotq_s32(vdupq_n_s32(0), a, vld1q_s8(low)), b, vld1q_s8(low + 16));
    sum.v = vfmaq_n_f32(sum.v, vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(h, 8), l)), scale);
  }
};

#elif defined(__AVX2__)

struct Sum {
  __m256 v = _mm256_setzero_ps();
  float total() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
};

struct Weights {
  __m256i w;

  static Weights four(const uint8_t* p) {
    __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
    return {_mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(q, 4), mask), _mm_and_si128(q, mask))};
  }
  static Weights eight(const uint8_t* p) {
    return {_mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_set1_epi8(-128))};
  }

  // Signed times signed: the sign of the weight goes to the activation. |w| <= 128, so pairs fit in 16 bits.
  __m256i dot(const int8_t* x) const {
    __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    __m256i magnitude = _mm256_abs_epi8(w), signedx = _mm256_sign_epi8(v, w);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), magnitude, signedx);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signedx), _mm256_set1_epi16(1));
#endif
  }
  void add(Sum& sum, const int8_t* high, const int8_t* low, float scale) const {
    __m256i both = _mm256_add_epi32(_mm256_slli_epi32(dot(high), 8), dot(low));
    sum.v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(both), _mm256_set1_ps(scale), sum.v);
  }
};

#else

struct Sum {
  float v = 0;
  float total() const { return v; }
};

struct Weights {
  int8_t w[kBlock];

  static Weights four(const uint8_t* p) {
    Weights out;
    for (int i = 0; i < 16; i++) {
      out.w[i] = static_cast<int8_t>(p[i] & 15);
      out.w[16 + i] = static_cast<int8_t>(p[i] >> 4);
    }
    return out;
  }
  static Weights eight(const uint8_t* p) {
    Weights out;
    for (int i = 0; i < kBlock; i++) out.w[i] = static_cast<int8_t>(p[i] ^ 128);
    return out;
  }

  void add(Sum& sum, const int8_t* high, const int8_t* low, float scale) const {
    int32_t h = 0, l = 0;
    for (int i = 0; i < kBlock; i++) {
      h += w[i] * high[i];
      l += w[i] * low[i];
    }
    sum.v += scale * static_cast<float>(256 * h + l);
  }
};

#endif

// What 16 bits hold such that both halves fit in 8 signed ones: 256 * 127 + 127.
constexpr float kLargest = 32639.0f;

void quantise(const float* x, int columns, int group, bool split_pairs, Quantised out) {
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
      int place = split_pairs ? (i & 1) * 16 + i / 2 : i;
      int value = static_cast<int>(std::lrintf(x[i] * inverse));
      int top = (value + 128) >> 8;
      high[place] = static_cast<int8_t>(top);
      // -128 has no opposite in 8 bits, which one instruction set needs; being off by one there does not show.
      low[place] = static_cast<int8_t>(std::max(value - 256 * top, -127));
    }
  }
}

// The biases' share of a product: they multiply the activations' sums.
template <int Bits>
float offset(const PackedMatrix& w, int n, const float* sums) {
  constexpr int kLanes = 8;  // added up apart, so that they need not wait for each other
  const int groups = w.groups();
  const float *scales = w.scales + static_cast<size_t>(n) * groups, *biases = w.biases + static_cast<size_t>(n) * groups;
  const float shift = Bits == 8 ? 128.0f : 0.0f;
  float lanes[kLanes] = {};
  int group = 0;
  for (; group + kLanes <= groups; group += kLanes)
    for (int i = 0; i < kLanes; i++) lanes[i] += (biases[group + i] + shift * scales[group + i]) * sums[group + i];
  for (int i = 0; group < groups; i++, group++) lanes[i] += (biases[group] + shift * scales[group]) * sums[group];
  float total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

// R weight rows times M activation rows, kept in registers over the whole width.
template <int R, int M, int Bits>
void tile(const PackedMatrix& w, const Quantised& x, int n, float* y, size_t stride) {
  constexpr int kBytes = kBlock * Bits / 8;
  const int blocks = w.blocks(), per_group = w.group / kBlock, groups = w.groups();
  const size_t row_bytes = w.row_bytes();
  const uint8_t* quanta = w.quanta + n * row_bytes;
  const float* scales = w.scales + static_cast<size_t>(n) * groups;
  Sum sums[R][M];
  for (int group = 0, block = 0; group < groups; group++) {
    float scale[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) scale[r] = scales[r * groups + group];
    for (int end = block + per_group; block < end; block++) {
      Weights weights[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const uint8_t* p = quanta + r * row_bytes + static_cast<size_t>(block) * kBytes;
        weights[r] = Bits == 4 ? Weights::four(p) : Weights::eight(p);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const size_t at = static_cast<size_t>(m) * blocks + block;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
          weights[r].add(sums[r][m], x.high + at * kBlock, x.low + at * kBlock, scale[r] * x.scales[at]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      y[m * stride + n + r] = sums[r][m].total() + offset<Bits>(w, n + r, x.sums + static_cast<size_t>(m) * groups);
}

template <int M, int Bits>
void rows(const PackedMatrix& w, const Quantised& x, int first, int last, float* y, size_t stride) {
  constexpr int kRows = M > 2 ? 2 : 4;  // as many sums as registers hold
  int n = first;
  for (; n + kRows <= last; n += kRows) tile<kRows, M, Bits>(w, x, n, y, stride);
  for (; n < last; n++) tile<1, M, Bits>(w, x, n, y, stride);
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
  for (; count >= 4; advance(4)) rows<4, Bits>(w, x, first, last, y, stride);
  for (; count >= 1; advance(1)) rows<1, Bits>(w, x, first, last, y, stride);
}

void multiply(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride) {
  if (w.bits == 4)
    multiply_bits<4>(w, x, count, first, last, y, stride);
  else
    multiply_bits<8>(w, x, count, first, last, y, stride);
}

void unpack(const PackedMatrix& w, int first, int last, float* out) {
  const int groups = w.groups();
  for (int n = first; n < last; n++) {
    const uint8_t* p = w.quanta + n * w.row_bytes();
    for (int group = 0; group < groups; group++, out += w.group) {
      const float scale = w.scales[static_cast<size_t>(n) * groups + group];
      const float bias = w.biases[static_cast<size_t>(n) * groups + group];
      if (w.bits == 4) {
        for (int i = 0; i < w.group / 2; i++) {
          out[2 * i] = scale * static_cast<float>(p[i] & 15) + bias;
          out[2 * i + 1] = scale * static_cast<float>(p[i] >> 4) + bias;
        }
        p += w.group / 2;
      } else {
        for (int i = 0; i < w.group; i++) out[i] = scale * static_cast<float>(p[i]) + bias;
        p += w.group;
      }
    }
  }
}

}  // namespace

extern const Kernels INGOT_NAME(kernels);
const Kernels INGOT_NAME(kernels) = {INGOT_TEXT(INGOT_ISA), quantise, multiply, unpack};

}  // namespace ingot
