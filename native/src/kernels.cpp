// Compiled several times with different flags; INGOT_ISA names the result.
#include "kernels.h"

#include "isa.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#define INGOT_TEXT(name) INGOT_TEXT_(name)
#define INGOT_TEXT_(name) #name

namespace ingot {
namespace {

constexpr int kSteps = kBlock / 4;  // a block is multiplied four columns at a time

// A number of 16 bits: a sign, 5 bits of exponent, 10 of fraction.
struct Half {
  uint16_t bits;
};

inline float value(float number) { return number; }

inline float value(Half half) {
  // Moved to where a float has them, exponent and fraction lack only the difference of the two biases, which a product
  // supplies, also to the smallest numbers.
  const uint32_t magnitude = static_cast<uint32_t>(half.bits & 0x7fff) << 13, sign = static_cast<uint32_t>(half.bits & 0x8000) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f) | sign);
}

// For each instruction set: `Sum` and `Ints` hold a number for each row of a tile, `Bytes` four quanta of each.
// `product` multiplies a block of weights with a block of activations, `products` with those of some rows of a lot. At
// most `kMostTogether` rows are multiplied at once: more would not fit in registers, fewer would wait for each other.
#if defined(__ARM_FEATURE_DOTPROD)

constexpr int kTile = 4;
constexpr bool kSignedBytes = true;
using Sum = float32x4_t;
using Ints = int32x4_t;
using Bytes = int8x16_t;
constexpr int kMostTogether = 8;

inline Sum zero() { return vdupq_n_f32(0); }
inline Sum load(const float* p) { return vld1q_f32(p); }
inline Sum load(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline void store(float* p, Sum sum) { vst1q_f32(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return vfmaq_n_f32(sum, a, b); }
// Integers are added up in the lowest bits of a large float, 1.5 * 2^23, since taking it off again is four times as fast
// as a conversion.
alignas(16) constexpr int32_t kStart[] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
inline Ints start() {
  Ints ints;
  // From memory each time, as a copy of a register takes the place of a product.
  asm volatile("ldr %q0, %1" : "=w"(ints) : "m"(kStart));
  return ints;
}
inline Sum scaled(Ints product, Sum scales) {
  return vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(product), vdupq_n_f32(0x1.8p23f)), scales);
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
    Ints sum = vdotq_laneq_s32(start(), w[0], first, 0);
    sum = vdotq_laneq_s32(sum, w[1], first, 1);
    sum = vdotq_laneq_s32(sum, w[2], first, 2);
    sum = vdotq_laneq_s32(sum, w[3], first, 3);
    sum = vdotq_laneq_s32(sum, w[4], second, 0);
    sum = vdotq_laneq_s32(sum, w[5], second, 1);
    sum = vdotq_laneq_s32(sum, w[6], second, 2);
    return vdotq_laneq_s32(sum, w[7], second, 3);
  }

  template <int N>
  void products(const int8_t* x, Ints* sums) const {
    if constexpr (N % 4 == 0) {
#pragma GCC unroll 2
      for (int n = 0; n < N; n += 4) four(x + n * kBlock, sums + n);
    } else {
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) sums[n] = product(x + n * kBlock);
    }
  }

 private:
  // The blocks of four rows. Written out, as the compiler would do one row after another, whose products wait for each
  // other, and would do floats in between, to which cores turn from integers with a loss.
  void four(const int8_t* x, Ints* sums) const {
#define INGOT_LOAD(at)               \
  "ldr q28, [%12, #" at "]\n"        \
  "ldr q29, [%12, #" at " + 32]\n"   \
  "ldr q30, [%12, #" at " + 64]\n"   \
  "ldr q31, [%12, #" at " + 96]\n"
#define INGOT_STEP(w, at)                   \
  "sdot %0.4s, " w ".16b, v28.4b[" at "]\n" \
  "sdot %1.4s, " w ".16b, v29.4b[" at "]\n" \
  "sdot %2.4s, " w ".16b, v30.4b[" at "]\n" \
  "sdot %3.4s, " w ".16b, v31.4b[" at "]\n"
    asm("ldr %q0, %13\nldr %q1, %13\nldr %q2, %13\nldr %q3, %13\n"
        INGOT_LOAD("0") INGOT_STEP("%4", "0") INGOT_STEP("%5", "1") INGOT_STEP("%6", "2") INGOT_STEP("%7", "3")
        INGOT_LOAD("16") INGOT_STEP("%8", "0") INGOT_STEP("%9", "1") INGOT_STEP("%10", "2") INGOT_STEP("%11", "3")
        : "=&w"(sums[0]), "=&w"(sums[1]), "=&w"(sums[2]), "=&w"(sums[3])
        : "w"(w[0]), "w"(w[1]), "w"(w[2]), "w"(w[3]), "w"(w[4]), "w"(w[5]), "w"(w[6]), "w"(w[7]), "r"(x), "Q"(kStart),
          "m"(*reinterpret_cast<const int8_t(*)[4 * kBlock]>(x))
        : "v28", "v29", "v30", "v31");
#undef INGOT_STEP
#undef INGOT_LOAD
  }
};

#elif defined(__AVX512VNNI__)

constexpr int kTile = 16;
constexpr bool kSignedBytes = false;
using Sum = __m512;
using Ints = __m512i;
using Bytes = __m512i;
constexpr int kMostTogether = 4;

inline Sum zero() { return _mm512_setzero_ps(); }
inline Sum load(const float* p) { return _mm512_loadu_ps(p); }
inline Sum load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(float* p, Sum sum) { _mm512_storeu_ps(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), sum); }
inline Sum scaled(Ints product, Sum scales) { return _mm512_mul_ps(_mm512_cvtepi32_ps(product), scales); }
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

  template <int N>
  void products(const int8_t* x, Ints* sums) const {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n] = product(x + kBlock * n);
  }
};

#elif defined(__AVX2__)

constexpr int kTile = 8;
constexpr bool kSignedBytes = true;
using Sum = __m256;
using Ints = __m256i;
using Bytes = __m256i;
constexpr int kMostTogether = 4;

inline Sum zero() { return _mm256_setzero_ps(); }
inline Sum load(const float* p) { return _mm256_loadu_ps(p); }
inline Sum load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(float* p, Sum sum) { _mm256_storeu_ps(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), sum); }
inline Sum scaled(Ints product, Sum scales) { return _mm256_mul_ps(_mm256_cvtepi32_ps(product), scales); }
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

  template <int N>
  void products(const int8_t* x, Ints* sums) const {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n] = product(x + kBlock * n);
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
constexpr int kMostTogether = 4;

inline Sum zero() { return {}; }
template <class Factor>
inline Sum load(const Factor* p) {
  Sum sum;
  for (int r = 0; r < kTile; r++) sum.v[r] = value(p[r]);
  return sum;
}
inline void store(float* p, Sum sum) { std::memcpy(p, sum.v, sizeof(sum.v)); }
inline Sum plus(Sum sum, Sum a, float b) {
  for (int r = 0; r < kTile; r++) sum.v[r] += a.v[r] * b;
  return sum;
}
inline Sum scaled(Ints product, Sum scales) {
  for (int r = 0; r < kTile; r++) scales.v[r] *= static_cast<float>(product.v[r]);
  return scales;
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

  template <int N>
  void products(const int8_t* x, Ints* sums) const {
    // A product is a hundred instructions: written out for each row, they take long to compile and gain nothing.
#pragma GCC unroll 1
    for (int n = 0; n < N; n++) sums[n] = product(x + kBlock * n);
  }
};

#endif

constexpr float kLargest = 127;
constexpr float kMagic = 0x1.8p23f;  // what is added to it is rounded to an integer in its lowest bits

struct Rounded {
  float scale;
  int32_t sum;  // of the integers
};

// A block in which the largest number is more than so many times the root of the mean square has a rest.
constexpr float kOutlier = 4;

struct Spread {
  float largest, mean_square;
};

#if defined(__AVX512VNNI__)

Spread spread(const float* x) {
  const __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
  const __m512 square = _mm512_fmadd_ps(first, first, _mm512_mul_ps(second, second));
  return {_mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second))), _mm512_reduce_add_ps(square) / kBlock};
}

Rounded round_block(const float* x, float largest, int8_t* values) {
  const __m512 inverse = _mm512_set1_ps(largest > 0 ? kLargest / largest : 0);
  const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
  const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm512_cvtepi32_epi8(first));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16), _mm512_cvtepi32_epi8(second));
  return {largest / kLargest, _mm512_reduce_add_epi32(_mm512_add_epi32(first, second))};
}

#elif defined(__ARM_FEATURE_DOTPROD)

Spread spread(const float* x) {
  float32x4_t largest = vdupq_n_f32(0), square = largest;
  for (int i = 0; i < kBlock; i += 4) {
    const float32x4_t v = vld1q_f32(x + i);
    largest = vmaxnmq_f32(largest, vabsq_f32(v));
    square = vfmaq_f32(square, v, v);
  }
  return {vmaxnmvq_f32(largest), vaddvq_f32(square) / kBlock};
}

Rounded round_block(const float* x, float largest, int8_t* values) {
  const float inverse = largest > 0 ? kLargest / largest : 0;
  int32x4_t sum = vdupq_n_s32(0);
  for (int i = 0; i < kBlock; i += 16) {
    int16x8_t n[4];  // an integer in the first half of each pair
    for (int j = 0; j < 4; j++)
      n[j] = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * j), inverse), vdupq_n_f32(kMagic)));
    const int16x8_t first = vuzp1q_s16(n[0], n[1]), second = vuzp1q_s16(n[2], n[3]);
    const int8x16_t all = vuzp1q_s8(vreinterpretq_s8_s16(first), vreinterpretq_s8_s16(second));
    sum = vdotq_s32(sum, all, vdupq_n_s8(1));
    vst1q_s8(values + i, all);
  }
  return {largest / kLargest, vaddvq_s32(sum)};
}

#else

constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
// Unsigned, as those of what is no number, or too small to be scaled, may add up to more than an integer holds.
typedef uint32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef int8_t ByteLanes __attribute__((vector_size(kLanes)));

inline Lanes lanes(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

Spread spread(const float* x) {
  Lanes largest{}, square{};
  for (int i = 0; i < kBlock; i += kLanes) {
    const Lanes v = lanes(x + i), size = v < 0 ? -v : v;
    largest = size > largest ? size : largest;
    square += v * v;
  }
  float most = 0, sum = 0;
  for (int l = 0; l < kLanes; l++) {
    most = std::max(most, largest[l]);
    sum += square[l];
  }
  return {most, sum / kBlock};
}

Rounded round_block(const float* x, float largest, int8_t* values) {
  const float inverse = largest > 0 ? kLargest / largest : 0;
  IntLanes sum{};
  for (int i = 0; i < kBlock; i += kLanes) {
    const Lanes shifted = lanes(x + i) * inverse + kMagic;
    const IntLanes integers = std::bit_cast<IntLanes>(shifted) - std::bit_cast<uint32_t>(kMagic);
    const ByteLanes bytes = __builtin_convertvector(integers, ByteLanes);
    std::memcpy(values + i, &bytes, sizeof(bytes));
    sum += integers;
  }
  uint32_t whole = 0;
  for (int l = 0; l < kLanes; l++) whole += sum[l];
  return {largest / kLargest, static_cast<int32_t>(whole)};
}

#endif

// What rounding took from a block.
Rounded round_rest(const float* x, Rounded main, const int8_t* values, int8_t* rests) {
  float rest[kBlock];
  for (int i = 0; i < kBlock; i++) rest[i] = x[i] - main.scale * static_cast<float>(values[i]);
  return round_block(rest, main.scale / 2, rests);
}

void quantise(const float* x, int columns, int group, int lot, int place, Quantised out) {
  const int per_group = group / kBlock;
  for (int block = 0; block < columns / kBlock; block++, x += kBlock) {
    const size_t at = static_cast<size_t>(block) * lot + place;
    int8_t *values = out.values + at * kBlock, *rests = out.rests + at * kBlock;
    const Spread found = spread(x);
    // Infinities and what is no number make the mean so too, and then the sums.
    const Rounded main = round_block(x, found.largest, values);
    Rounded rest{0, 0};
    if (found.largest * found.largest > kOutlier * kOutlier * found.mean_square) {
      rest = round_rest(x, main, values, rests);
      out.rest_scales[at] = rest.scale;
      // Other rows of the lot may be rounded at the same time.
      std::atomic_ref(out.marks[static_cast<size_t>(block) * lot]).fetch_or(1 << place, std::memory_order_relaxed);
    }
    out.scales[at] = main.scale;
    float& whole = out.sums[static_cast<size_t>(block / per_group) * lot + place];
    whole = (block % per_group == 0 ? found.mean_square * 0.0f : whole) + main.scale * static_cast<float>(main.sum) +
            rest.scale * static_cast<float>(rest.sum);
  }
}

// The bias of each row of a tile, as the stored quanta need it.
template <int Bits, class Factor>
inline Sum bias_of(const Factor* biases, Sum scale) {
  return Bits == 8 && kSignedBytes ? plus(load(biases), scale, 128.0f) : load(biases);
}

// A block of weights times the blocks of a lot's rows.
template <int M, class Weights>
inline void add_products(const Weights& weights, const int8_t* values, const float* factors, Sum scale, Sum* sums) {
  constexpr int kTogether = std::min(M, kMostTogether);
#pragma GCC unroll 2
  for (int m = 0; m < M; m += kTogether) {
    Ints found[kTogether];
    weights.template products<kTogether>(values + m * kBlock, found);
    Sum numbers[kTogether];
#pragma GCC unroll 8
    for (int i = 0; i < kTogether; i++) numbers[i] = scaled(found[i], scale);
#pragma GCC unroll 8
    for (int i = 0; i < kTogether; i++) sums[m + i] = plus(sums[m + i], numbers[i], factors[m + i]);
  }
}

// As many numbers of a tile as are wanted.
inline void keep(Sum sum, float* to, int wanted) {
  if (wanted >= kTile) {
    store(to, sum);
    return;
  }
  float all[kTile];
  store(all, sum);
  std::memcpy(to, all, sizeof(float) * wanted);
}

// With so few rows, weights are waited for: they are asked for that many bytes ahead, beyond the end of a page too, where
// the processor itself stops looking ahead.
constexpr int kWaiting = 2;
constexpr size_t kAhead = 2048;

// One tile of weights times the M activation rows of a lot, with the sums in registers over the whole width.
template <int M, int Bits, class Factor>
void tile(const PackedMatrix& w, Quantised x, int n, int last, float* y, size_t stride) {
  constexpr size_t block_bytes = kTile * kBlock * Bits / 8;
  const int blocks = w.blocks(), per_group = w.group / kBlock, groups = w.groups();
  const size_t factors = static_cast<size_t>(n) * groups;
  const uint8_t* quanta = w.quanta + static_cast<size_t>(n / kTile) * blocks * block_bytes;
  const Factor* scales = static_cast<const Factor*>(w.scales) + factors;
  const Factor* biases = static_cast<const Factor*>(w.biases) + factors;
  Sum sums[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) sums[m] = zero();
  for (int group = 0, block = 0; group < groups; group++, scales += kTile, biases += kTile) {
    const Sum scale = load(scales);
    for (int end = block + per_group; block < end; block++, quanta += block_bytes) {
      if constexpr (M <= kWaiting)
        for (int line = 0; line < kTile * kBlock * Bits / 8; line += 64) __builtin_prefetch(quanta + kAhead + line);
      const Block<Bits> weights(quanta);
      const size_t at = static_cast<size_t>(block) * M;
      add_products<M>(weights, x.values + at * kBlock, x.scales + at, scale, sums);
      if (const uint8_t marks = x.marks[at]; marks != 0)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
          if (marks >> m & 1)
            sums[m] = plus(sums[m], scaled(weights.product(x.rests + (at + m) * kBlock), scale), x.rest_scales[at + m]);
    }
    const Sum bias = bias_of<Bits>(biases, scale);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sums[m] = plus(sums[m], bias, x.sums[group * M + m]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) keep(sums[m], y + m * stride + n, last - n);
}

template <int M, int Bits, class Factor>
void lots(const PackedMatrix& w, Quantised& x, int& count, int first, int last, float*& y, size_t stride) {
  for (; count >= M; count -= M) {
    for (int n = first; n < last; n += kTile) tile<M, Bits, Factor>(w, x, n, last, y, stride);
    const size_t blocks = static_cast<size_t>(M) * w.blocks();
    x.values += blocks * kBlock;
    x.rests += blocks * kBlock;
    x.scales += blocks;
    x.rest_scales += blocks;
    x.marks += blocks;
    x.sums += static_cast<size_t>(M) * w.groups();
    y += M * stride;
  }
}

template <int Bits, class Factor>
void multiply_as(const PackedMatrix& w, Quantised x, int count, int first, int last, float* y, size_t stride) {
  lots<kLot, Bits, Factor>(w, x, count, first, last, y, stride);
  lots<4, Bits, Factor>(w, x, count, first, last, y, stride);
  lots<2, Bits, Factor>(w, x, count, first, last, y, stride);
  lots<1, Bits, Factor>(w, x, count, first, last, y, stride);
}

void multiply(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride) {
  const auto use = w.bits == 4 ? (w.halves ? multiply_as<4, Half> : multiply_as<4, float>)
                               : (w.halves ? multiply_as<8, Half> : multiply_as<8, float>);
  use(w, x, count, first, last, y, stride);
}

template <int Bits, class Factor>
void unpack_row(const PackedMatrix& w, int n, float* out) {
  const int per_group = w.group / kBlock, groups = w.groups(), row = n % kTile;
  const size_t block_bytes = kTile * w.block_bytes(), factors = static_cast<size_t>(n / kTile) * groups * kTile + row;
  const uint8_t* p = w.quanta + static_cast<size_t>(n / kTile) * w.blocks() * block_bytes + 4 * row;
  for (int block = 0; block < w.blocks(); block++, p += block_bytes, out += kBlock) {
    const size_t factor = factors + static_cast<size_t>(block / per_group) * kTile;
    const float scale = value(static_cast<const Factor*>(w.scales)[factor]);
    const float bias = value(static_cast<const Factor*>(w.biases)[factor]);
    for (int k = 0; k < kBlock; k++) {
      const int step = k / 4, t = k % 4;
      int quantum;
      if constexpr (Bits == 4)
        quantum = p[4 * kTile * (step / 2) + t] >> (step % 2 * 4) & 15;
      else
        quantum = p[4 * kTile * step + t] ^ (kSignedBytes ? 128 : 0);
      out[k] = scale * static_cast<float>(quantum) + bias;
    }
  }
}

void unpack(const PackedMatrix& w, int first, int last, float* out) {
  const auto use = w.bits == 4 ? (w.halves ? unpack_row<4, Half> : unpack_row<4, float>)
                               : (w.halves ? unpack_row<8, Half> : unpack_row<8, float>);
  for (int n = first; n < last; n++, out += w.columns) use(w, n, out);
}

}  // namespace

extern const Kernels INGOT_NAME(kernels);
const Kernels INGOT_NAME(kernels) = {INGOT_TEXT(INGOT_ISA), kTile, kSignedBytes, quantise, multiply, unpack};

}  // namespace ingot
