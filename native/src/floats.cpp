// Compiled several times with different flags; INGOT_ISA names the result. Plain loops over a fixed number of lanes,
// which the compiler turns into vectors without being allowed to reorder sums.
#include "floats.h"

#include "fused.h"
#include "isa.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

namespace ingot {
namespace {

typedef float Vec __attribute__((vector_size(4 * kVector)));
typedef int32_t IntegerVec __attribute__((vector_size(4 * kVector)));

template <class V>
inline V loaded(const float* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
inline V loaded(const Half* from) {
#if defined(__aarch64__)
  if constexpr (sizeof(V) == 16) return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
#if defined(__F16C__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  if constexpr (sizeof(V) == 16) return (V)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
  V v;
  for (size_t i = 0; i < sizeof(V) / sizeof(float); i++) v[i] = value(from[i]);
  return v;
}

template <class V>
inline void stored(float* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// What follows is written for a value and for a vector of them: the compiler makes no vectors of code that chooses.
template <class F>
using Integer = std::conditional_t<std::is_same_v<F, float>, int32_t, IntegerVec>;

// The larger of both; what is no number stays so.
inline float at_least(float x, float least) { return x < least ? least : x; }

inline Vec at_least(Vec x, float least) {
#if defined(__aarch64__)
  return (Vec)vmaxq_f32((float32x4_t)x, vdupq_n_f32(least));
#elif defined(__AVX512F__)
  return (Vec)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);
#else
  const Vec bound = Vec{} + least;
  return x < bound ? bound : x;
#endif
}

constexpr float kLeast = -87.0f;

// Relative error below 2e-7 for x from kLeast to 0; next to nothing below, which is enough for softmax.
template <class F>
inline F share(F given) {
  const F x = at_least(given, kLeast);
  // So large that its last bit is worth one: the sum's last bits are the nearest whole number.
  const F shifted = fused(x, 1.44269504f, F{} + 12582912.0f), n = shifted - 12582912.0f;
  const F r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x)), square = r * r;
  // In pairs, which do not wait for each other.
  const F first = fused(r, 1.6666665459e-1f, F{} + 5.0000001201e-1f);
  const F second = fused(r, 8.3334519073e-3f, F{} + 4.1665795894e-2f);
  const F third = fused(r, 1.9875691500e-4f, F{} + 1.3981999507e-3f);
  const F y = fused(fused(fused(third, square, second), square, first), square, r) + 1.0f;
  const Integer<F> exponent = (std::bit_cast<Integer<F>>(shifted) << 23) + (127 << 23);
  return y * std::bit_cast<F>(exponent);
}

// The same, and nothing below: it may be multiplied with what is huge.
template <class F>
inline F exponential(F x) {
  return x < kLeast ? F{} : share(x);
}

// y[i] = function(i) for vectors of values, then for those that are left.
template <class Function>
inline void each(size_t size, float* y, const Function& function) {
  size_t i = 0;
  for (; i + kVector <= size; i += kVector) stored(y + i, function([i](const float* x) { return loaded<Vec>(x + i); }));
  for (; i < size; i++) y[i] = function([i](const float* x) { return x[i]; });
}

// The sum of some numbers, as of a tree: of each half the same way.
template <int N>
inline float tree_total(const float* parts) {
  if constexpr (N == 1)
    return parts[0];
  else
    return tree_total<N / 2>(parts) + tree_total<N / 2>(parts + N / 2);
}

inline float total(Vec v) {
  float lanes[kVector];
  stored(lanes, v);
  return tree_total<kVector>(lanes);
}

// add(sum, i) for vectors of values and then for those that are left, in several sums, which do not wait for each other.
template <class Add>
inline float total_of(int size, const Add& add) {
  constexpr int kSums = 4;
  Vec sums[kSums] = {};
  auto vector = [](int i) { return [i](const float* x) { return loaded<Vec>(x + i); }; };
  int i = 0;
  for (; i + kSums * kVector <= size; i += kSums * kVector)
#pragma GCC unroll 4
    for (int j = 0; j < kSums; j++) sums[j] = add(sums[j], vector(i + j * kVector));
  for (; i + kVector <= size; i += kVector) sums[0] = add(sums[0], vector(i));
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < size; i++) sum = add(sum, [i](const float* x) { return x[i]; });
  return sum;
}

void rms_norm(const float* x, const float* weight, float eps, int size, float* y) {
  const float squares = total_of(size, [x](auto sum, auto at) { return fused(at(x), at(x), sum); });
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
  each(size, y, [=](auto at) { return at(x) * inverse * at(weight); });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int size, float* y) {
  const float mean = total_of(size, [x](auto sum, auto at) { return sum + at(x); }) / static_cast<float>(size);
  const float squares = total_of(size, [=](auto sum, auto at) { return fused(at(x) - mean, at(x) - mean, sum); });
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
  each(size, y, [=](auto at) { return (at(x) - mean) * inverse; });
  if (weight) each(size, y, [=](auto at) { return at(y) * at(weight); });
  if (bias) each(size, y, [=](auto at) { return at(y) + at(bias); });
}

void add(float* y, const float* x, size_t size) {
  for (size_t i = 0; i < size; i++) y[i] += x[i];
}

template <class F>
inline F magnitude(F x) {
  return x < 0.0f ? -x : x;
}

// Of two equal forms, the one whose exponential cannot overflow.
template <class F>
inline F sigmoid(F x) {
  const F e = exponential<F>(-magnitude(x)), one = F{} + 1.0f;
  return (x < 0.0f ? e : one) / (1.0f + e);
}

// The share of a normal distribution below x, after Abramowitz and Stegun 7.1.26: absolute error below 2e-7.
template <class F>
inline F normal_share(F x) {
  const F z = magnitude(x) * 0.707106781f, t = 1.0f / (1.0f + 0.3275911f * z);
  F y = t * 1.061405429f - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  const F tail = 0.5f * y * t * exponential<F>(-z * z), rest = 1.0f - tail;
  return x < 0.0f ? tail : rest;
}

void gated(Gate kind, const float* gate, const float* up, size_t size, float* y) {
  switch (kind) {
    case Gate::silu:
      return each(size, y, [&](auto at) { return at(gate) * sigmoid(at(gate)) * at(up); });
    case Gate::gelu:
      return each(size, y, [&](auto at) { return at(gate) * normal_share(at(gate)) * at(up); });
    case Gate::gelu_tanh:
      return each(size, y, [&](auto at) {
        const auto g = at(gate);
        // (1 + tanh(a)) / 2 is sigmoid(2 a).
        return g * sigmoid(1.59576912f * (g + 0.044715f * g * g * g)) * at(up);
      });
    case Gate::sigmoid:
      return each(size, y, [&](auto at) { return sigmoid(at(gate)) * at(up); });
  }
}

void swiglu(float* gate, const float* up, size_t size) { gated(Gate::silu, gate, up, size, gate); }

void rotate(float* head, const float* cosines, const float* sines, int dims, bool neighbours) {
  const int half = dims / 2;
  if (neighbours) {
    for (int i = 0; i < half; i++) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cosines[i] - b * sines[i];
      head[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
    return;
  }
  for (int i = 0; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = a * sines[i] + b * cosines[i];
  }
}

constexpr int kPanel = 2 * kVector;                      // keys that are scored at once
constexpr int kRows = kVector == 4 ? 8 : 4;              // rows that are scored at once: as many as registers allow
constexpr int kWide = kVector == 8 ? 2 : 4;              // vectors of values that are summed at once
constexpr int kParts = kVector == 16 ? 16 : 4;           // sums that a score is made of
constexpr int kPacked = 12;                              // rows from which it pays to turn the keys around

typedef float Part __attribute__((vector_size(4 * kParts)));

// A score is always the sum of the same parts, part p being that of the dims p, p + kParts and so on, added up as a tree whose
// leaves are in this order, so that it does not depend on the function that computes it.
#if defined(__AVX512F__)
constexpr int kLeaves[kParts] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
#else
constexpr int kLeaves[kParts] = {0, 2, 1, 3};
#endif

inline float total_of_parts(Part part) {
  float leaves[kParts];
  for (int i = 0; i < kParts; i++) leaves[i] = part[kLeaves[i]];
  return tree_total<kParts>(leaves);
}

// Each of four scores as the sum of its parts.
inline void store_totals(const Part* four, float* to) {
#if defined(__AVX512F__)
  auto halved = [four](int i, int j) {
    const __m512 a = (__m512)four[i], b = (__m512)four[j];
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  const __m512d a = halved(0, 1), b = halved(2, 3);
  const __m512 sums = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  typedef int32_t Order __attribute__((vector_size(16)));
  const Part a = __builtin_shuffle(four[0], four[1], Order{0, 4, 1, 5}) + __builtin_shuffle(four[0], four[1], Order{2, 6, 3, 7});
  const Part b = __builtin_shuffle(four[2], four[3], Order{0, 4, 1, 5}) + __builtin_shuffle(four[2], four[3], Order{2, 6, 3, 7});
  stored(to, __builtin_shuffle(a, b, Order{0, 1, 4, 5}) + __builtin_shuffle(a, b, Order{2, 3, 6, 7}));
#endif
}

// As many dims as there are left; nought beyond.
template <class Number>
inline Part some_dims(const Number* from, int left) {
  Part part{};
  for (int i = 0; i < left; i++) part[i] = value(from[i]);
  return part;
}

// Scores of R rows with K keys.
template <int R, int K, class Number>
inline void few_scores(const float* q, const Number* k, int dim, float* out) {
  Part parts[R][K] = {};
  auto add = [&](int d, auto load) {
    Part keys[K];
#pragma GCC unroll 8
    for (int b = 0; b < K; b++) keys[b] = load(k + static_cast<size_t>(b) * dim + d);
#pragma GCC unroll 4
    for (int a = 0; a < R; a++) {
      const Part row = load(q + static_cast<size_t>(a) * dim + d);
#pragma GCC unroll 8
      for (int b = 0; b < K; b++) parts[a][b] = fused(row, keys[b], parts[a][b]);
    }
  };
  int d = 0;
  for (; d + kParts <= dim; d += kParts) add(d, [](const auto* from) { return loaded<Part>(from); });
  if (const int left = dim - d; left > 0) add(d, [left](const auto* from) { return some_dims(from, left); });
#pragma GCC unroll 4
  for (int a = 0; a < R; a++) {
    float* to = out + static_cast<size_t>(a) * kKeyBlock;
    if constexpr (K % 4 == 0)
#pragma GCC unroll 2
      for (int b = 0; b < K; b += 4) store_totals(parts[a] + b, to + b);
    else
      for (int b = 0; b < K; b++) to[b] = total_of_parts(parts[a][b]);
  }
}

// Asks for numbers that are read soon.
template <class Number>
inline void ask_for(const Number* from, size_t count) {
  constexpr size_t kLine = 64 / sizeof(Number);
  for (size_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

// With few rows, keys and values are waited for: keys are asked for that many bytes ahead, and the values of a key when
// it is scored.
constexpr size_t kAhead = 4096;

template <int R, class Number>
void scored(const float* q, const Number* k, const Number* v, int lo, int hi, int dim, float* scores) {
  constexpr int K = R == 1 ? 8 : 4;
  int j = lo;
  for (; j + K <= hi; j += K) {
    const ptrdiff_t at = static_cast<ptrdiff_t>(j) * dim;
    ask_for(k + at + kAhead / sizeof(Number), static_cast<size_t>(K) * dim);
    ask_for(v + at, static_cast<size_t>(K) * dim);
    few_scores<R, K>(q, k + at, dim, scores + j);
  }
  for (; j < hi; j++) few_scores<R, 1>(q, k + static_cast<ptrdiff_t>(j) * dim, dim, scores + j);
}

// body(row, R) for the R rows from `row` on: four at a time, then what is left; R is a constant.
template <class Body>
inline void in_fours(int rows, const Body& body) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  switch (rows - row) {
    case 3: return body(row, std::integral_constant<int, 3>{});
    case 2: return body(row, std::integral_constant<int, 2>{});
    case 1: return body(row, std::integral_constant<int, 1>{});
  }
}

template <class Number>
void scored_apart(const float* q, int rows, const Number* k, const Number* v, int lo, int hi, int dim, float* scores) {
  in_fours(rows, [&](size_t row, auto count) {
    scored<decltype(count)::value>(q + row * dim, k, v, lo, hi, dim, scores + row * kKeyBlock);
  });
}

// kRows rows, turned around, with a panel of keys, turned around.
inline void panel_scores(const float* q, const float* keys, int dim, float* out) {
  // Sums of 1, 2, 4 and 8 leaves that wait for their other half, as the bits of how many there are.
  Vec waiting[std::bit_width(static_cast<unsigned>(kParts)) - 1][kRows][2], part[kRows][2];
  for (int leaf = 0; leaf < kParts; leaf++) {
    Vec sums[kRows][2] = {};
    for (int d = kLeaves[leaf]; d < dim; d += kParts) {
      const Vec one = loaded<Vec>(keys + static_cast<size_t>(d) * kPanel);
      const Vec two = loaded<Vec>(keys + static_cast<size_t>(d) * kPanel + kVector);
      const float* values = q + static_cast<size_t>(d) * kRows;
#pragma GCC unroll 8
      for (int a = 0; a < kRows; a++) {
        sums[a][0] = fused(one, values[a], sums[a][0]);
        sums[a][1] = fused(two, values[a], sums[a][1]);
      }
    }
    int level = 0;
    for (; leaf >> level & 1; level++)
#pragma GCC unroll 8
      for (int a = 0; a < kRows; a++)
        for (int b = 0; b < 2; b++) sums[a][b] = waiting[level][a][b] + sums[a][b];
    Vec(*to)[2] = leaf + 1 < kParts ? waiting[level] : part;
#pragma GCC unroll 8
    for (int a = 0; a < kRows; a++)
      for (int b = 0; b < 2; b++) to[a][b] = sums[a][b];
  }
#pragma GCC unroll 8
  for (int a = 0; a < kRows; a++)
    for (int b = 0; b < 2; b++) stored(out + static_cast<size_t>(a) * kKeyBlock + b * kVector, part[a][b]);
}

// Four values of four keys, turned around: four keys of four values.
template <class Number>
inline void turn(const Number* k, int dim, float* panel) {
  typedef float Four __attribute__((vector_size(16)));
  typedef int32_t Order __attribute__((vector_size(16)));
  Four keys[4];
  for (int i = 0; i < 4; i++) keys[i] = loaded<Four>(k + static_cast<ptrdiff_t>(i) * dim);
  const Four a = __builtin_shuffle(keys[0], keys[1], Order{0, 4, 1, 5}), b = __builtin_shuffle(keys[2], keys[3], Order{0, 4, 1, 5});
  const Four c = __builtin_shuffle(keys[0], keys[1], Order{2, 6, 3, 7}), d = __builtin_shuffle(keys[2], keys[3], Order{2, 6, 3, 7});
  stored(panel, __builtin_shuffle(a, b, Order{0, 1, 4, 5}));
  stored(panel + kPanel, __builtin_shuffle(a, b, Order{2, 3, 6, 7}));
  stored(panel + 2 * kPanel, __builtin_shuffle(c, d, Order{0, 1, 4, 5}));
  stored(panel + 3 * kPanel, __builtin_shuffle(c, d, Order{2, 3, 6, 7}));
}

// The keys [begin, begin + kPanel), value by value; those outside [lo, hi) are zero.
template <class Number>
void turn_keys(const Number* k, int begin, int lo, int hi, int dim, float* panel) {
  for (int j = 0; j < kPanel; j += 4) {
    const int key = begin + j;
    const Number* from = k + static_cast<ptrdiff_t>(key) * dim;
    int d = 0;
    if (key >= lo && key + 4 <= hi)
      for (; d + 4 <= dim; d += 4) turn(from + d, dim, panel + static_cast<size_t>(d) * kPanel + j);
    for (; d < dim; d++)
      for (int i = 0; i < 4; i++)
        panel[static_cast<size_t>(d) * kPanel + j + i] =
            key + i >= lo && key + i < hi ? value(from[static_cast<ptrdiff_t>(i) * dim + d]) : 0.0f;
  }
}

template <class Number>
void scored_together(const float* q, int rows, const Number* k, int lo, int hi, int dim, float* panel, float* scores) {
  for (int begin = lo / kPanel * kPanel; begin < hi; begin += kPanel) {
    turn_keys(k, begin, lo, hi, dim, panel);
    for (int row = 0; row < rows; row += kRows)
      panel_scores(q + static_cast<size_t>(row) * dim, panel, dim, scores + static_cast<size_t>(row) * kKeyBlock + begin);
  }
}

template <class F>
inline F capped(F score, float cap) {
  const F e = exponential<F>(-2.0f * magnitude(score / cap)), size = cap * ((1.0f - e) / (1.0f + e));
  return score < 0.0f ? -size : size;
}

// A row's scores [lo, hi) become weights, all others of its block 0. Gives what earlier sums are worth now.
float weighed(float* scores, int lo, int hi, float cap, float& largest, float& sum) {
  // Whole vectors, the ones at the ends with scores of which nothing is used.
  const int begin = lo / kVector * kVector, end = (hi + kVector - 1) / kVector * kVector;
  if (cap > 0)
    for (int j = begin; j < end; j += kVector) stored(scores + j, capped(loaded<Vec>(scores + j), cap));
  const float before = largest;
  std::fill(scores + begin, scores + lo, before);
  std::fill(scores + hi, scores + end, before);
  Vec most = Vec{} + before;
  for (int j = begin; j < end; j += kVector) {
    const Vec some = loaded<Vec>(scores + j);
    most = some > most ? some : most;
  }
  for (int l = 0; l < kVector; l++) largest = std::max(largest, most[l]);
  const float now = largest;
  for (int j = begin; j < end; j += kVector) stored(scores + j, share(loaded<Vec>(scores + j) - now));
  std::fill(scores, scores + lo, 0.0f);
  std::fill(scores + hi, scores + kKeyBlock, 0.0f);
  const float worth = share(before - now);
  sum = sum * worth + total_of(kKeyBlock, [scores](auto some, auto at) { return some + at(scores); });
  return worth;
}

// sums = sums * worth + weights . values, for R rows and the values of W vectors.
template <int R, int W, class Number>
inline void some_sums(const float* weights, const Number* v, int lo, int hi, int dim, const float* worth, float* sums) {
  Vec parts[R][W] = {};
  for (int j = lo; j < hi; j++) {
    Vec values[W];
#pragma GCC unroll 8
    for (int b = 0; b < W; b++) values[b] = loaded<Vec>(v + static_cast<ptrdiff_t>(j) * dim + b * kVector);
#pragma GCC unroll 4
    for (int a = 0; a < R; a++)
#pragma GCC unroll 8
      for (int b = 0; b < W; b++) parts[a][b] = fused(values[b], weights[static_cast<size_t>(a) * kKeyBlock + j], parts[a][b]);
  }
#pragma GCC unroll 4
  for (int a = 0; a < R; a++)
#pragma GCC unroll 8
    for (int b = 0; b < W; b++) {
      float* at = sums + static_cast<size_t>(a) * dim + b * kVector;
      stored(at, fused(loaded<Vec>(at), worth[a], parts[a][b]));
    }
}

template <int R, class Number>
void summed(const float* weights, const Number* v, int lo, int hi, int dim, const float* worth, float* sums) {
  constexpr int W = R == 1 ? 2 * kWide : kWide;  // one row alone needs more sums to keep the units busy
  int d = 0;
  for (; d + W * kVector <= dim; d += W * kVector) some_sums<R, W>(weights, v + d, lo, hi, dim, worth, sums + d);
  for (; d + kVector <= dim; d += kVector) some_sums<R, 1>(weights, v + d, lo, hi, dim, worth, sums + d);
  for (; d < dim; d++)
    for (int a = 0; a < R; a++) {
      float part = 0;
      for (int j = lo; j < hi; j++) part = fused(value(v[static_cast<ptrdiff_t>(j) * dim + d]), weights[static_cast<size_t>(a) * kKeyBlock + j], part);
      float& at = sums[static_cast<size_t>(a) * dim + d];
      at = fused(at, worth[a], part);
    }
}

template <class Number>
void widen(const Number* x, size_t size, float* y) {
  size_t i = 0;
  for (; i + kVector <= size; i += kVector) stored(y + i, loaded<Vec>(x + i));
  for (; i < size; i++) y[i] = value(x[i]);
}

void halve(const float* x, size_t size, Half* y) {
  size_t i = 0;
#if defined(__aarch64__)
  const float32x4_t most = vdupq_n_f32(kLargestHalf), least = vdupq_n_f32(-kLargestHalf);
  for (; i + 4 <= size; i += 4)
    vst1_u16(&y[i].bits, vreinterpret_u16_f16(vcvt_f16_f32(vmaxq_f32(vminq_f32(vld1q_f32(x + i), most), least))));
#elif defined(__F16C__)
  // Of two, the second is kept where one is no number.
  const __m256 most = _mm256_set1_ps(kLargestHalf), least = _mm256_set1_ps(-kLargestHalf);
  for (; i + 8 <= size; i += 8) {
    const __m256 some = _mm256_max_ps(least, _mm256_min_ps(most, _mm256_loadu_ps(x + i)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), _mm256_cvtps_ph(some, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < size; i++) y[i] = half_of(x[i]);
}

// What a tile of rows (queries times heads) needs while blocks of keys pass by.
struct Tile {
  Tile(float* scratch, int rows, int dim)
      : padded((rows + kRows - 1) / kRows * kRows), q(scratch), panel(q + static_cast<size_t>(padded) * dim),
        scores(panel + static_cast<size_t>(kPanel) * dim), worth(scores + static_cast<size_t>(padded) * kKeyBlock),
        values(worth + padded) {}

  int padded;
  float *q, *panel, *scores, *worth, *values;
};

// Queries times the scale; in the packed order, value by value for kRows rows together.
void take_queries(const Sight& how, const float* q, int queries, int group, size_t stride, bool packed, Tile& tile) {
  const int rows = queries * group;
  if (packed) std::fill(tile.q, tile.q + static_cast<size_t>(tile.padded) * how.dim, 0.0f);
  for (int row = 0; row < rows; row++) {
    const float* from = q + row / group * stride + static_cast<size_t>(row % group) * how.dim;
    if (packed) {
      float* to = tile.q + static_cast<size_t>(row / kRows * kRows) * how.dim + row % kRows;
      for (int d = 0; d < how.dim; d++) to[static_cast<size_t>(d) * kRows] = from[d] * how.scale;
    } else {
      float* to = tile.q + static_cast<size_t>(row) * how.dim;
      for (int d = 0; d < how.dim; d++) to[d] = from[d] * how.scale;
    }
  }
}

template <class Number>
void attend(const Sight& how, const float* q, int queries, int group, size_t stride, const Number* k, const Number* v,
            int keys, int stretch, float* scratch, Found found) {
  const int rows = queries * group, dim = how.dim;
  const bool packed = rows >= kPacked;
  Tile tile(scratch, rows, dim);
  if (q != nullptr) take_queries(how, q, queries, group, stride, packed, tile);
  std::fill(found.sums, found.sums + static_cast<size_t>(rows) * dim, 0.0f);
  std::fill(found.largest, found.largest + rows, -std::numeric_limits<float>::infinity());
  std::fill(found.total, found.total + rows, 0.0f);
  const int oldest = Stretches::oldest(how, queries, keys), end = std::min(keys, (stretch + 1) * kStretch - how.shift);
  const int begin = std::max((oldest + how.shift) / kKeyBlock * kKeyBlock, stretch * kStretch) - how.shift;
  for (int base = begin; base < end; base += kKeyBlock) {
    const int lo = std::max(oldest - base, 0), hi = std::min(end - base, kKeyBlock);
    const Number *block = k + static_cast<ptrdiff_t>(base) * dim, *values = v + static_cast<ptrdiff_t>(base) * dim;
    if (packed)
      scored_together(tile.q, rows, block, lo, hi, dim, tile.panel, tile.scores);
    else
      scored_apart(tile.q, rows, block, values, lo, hi, dim, tile.scores);
    auto sees = [&](int row) {
      const int until = keys - queries + row / group + 1 - base;
      return std::make_pair(how.window > 0 ? std::max(lo, until - how.window) : lo, std::min(hi, until));
    };
    for (int row = 0; row < rows; row++) {
      float* scores = tile.scores + static_cast<size_t>(row) * kKeyBlock;
      const auto [first, last] = sees(row);
      tile.worth[row] = 1.0f;
      if (first < last)
        tile.worth[row] = weighed(scores, first, last, how.cap, found.largest[row], found.total[row]);
      else
        std::fill(scores, scores + kKeyBlock, 0.0f);
    }
    auto sum_up = [&](const auto* values) {
      in_fours(rows, [&](int row, auto count) {
        constexpr int R = decltype(count)::value;
        const int begin = sees(row).first, end = sees(row + R - 1).second;
        summed<R>(tile.scores + static_cast<size_t>(row) * kKeyBlock, values, begin, end, dim, tile.worth + row,
                  found.sums + static_cast<size_t>(row) * dim);
      });
    };
    if (!packed || std::is_same_v<Number, float>) {
      sum_up(values);
    } else {
      const ptrdiff_t first = static_cast<ptrdiff_t>(lo) * dim;
      widen(values + first, static_cast<size_t>(hi - lo) * dim, tile.values + first);
      sum_up(static_cast<const float*>(tile.values));
    }
  }
}

void merge(Found all, Found more) {
  const int dim = all.dim;
  for (int row = 0; row < all.rows; row++) {
    if (more.total[row] == 0) continue;  // it saw none of those keys
    const bool first = all.total[row] == 0;
    const float now = first ? more.largest[row] : std::max(all.largest[row], more.largest[row]);
    const float before = first ? 0.0f : share(all.largest[row] - now), worth = share(more.largest[row] - now);
    all.largest[row] = now;
    all.total[row] = fused(all.total[row], before, more.total[row] * worth);
    float* sums = all.sums + static_cast<size_t>(row) * dim;
    const float* own = more.sums + static_cast<size_t>(row) * dim;
    each(dim, sums, [=](auto at) { return fused(at(sums), before, at(own) * worth); });
  }
}

}  // namespace

extern const Floats INGOT_NAME(floats);
const Floats INGOT_NAME(floats) = {rms_norm, layer_norm, add, swiglu, gated, rotate, attend<float>, attend<Half>, merge, halve};

}  // namespace ingot
