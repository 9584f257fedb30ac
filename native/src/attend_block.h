// Rows (queries times heads) and a block of keys and values, in float32: scores, weights, sums.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "floats.h"
#include "vectors.h"

namespace ingot {
namespace {

constexpr int kPanel = 2 * kVector;                      // keys that are scored at once
constexpr int kRows = kVector == 8 ? 4 : 8;              // rows that are scored at once: as many as registers allow
constexpr int kWide = kVector == 8 ? 2 : 4;              // vectors of values that are summed at once
constexpr int kParts = kVector;                          // sums that a score is made of
constexpr int kPacked = 12;                              // rows from which it pays to turn the keys around

typedef float Part __attribute__((vector_size(4 * kParts)));

// A score is always the sum of the same parts, part p being that of the dims p, p + kParts and so on, added up as a tree whose
// leaves are in this order, so that it does not depend on the function that computes it.
#if defined(__AVX512F__)
constexpr int kLeaves[kParts] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
#elif defined(__AVX2__)
constexpr int kLeaves[kParts] = {0, 2, 1, 3, 4, 6, 5, 7};
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
#elif defined(__AVX2__)
  auto halved = [four](int i, int j) {
    const __m256 a = (__m256)four[i], b = (__m256)four[j];
    return _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
  };
  const __m256d a = halved(0, 1), b = halved(2, 3);
  const __m256 sums = _mm256_add_ps((__m256)_mm256_unpacklo_pd(a, b), (__m256)_mm256_unpackhi_pd(a, b));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
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

// Scores of R rows with K keys, over the first `dim` dims of each; rows and keys lie `stride` apart. Both may be constants,
// with which no loop is left.
template <int R, int K, class Number, class Stride, class Dim>
inline void few_scores(const float* q, const Number* k, Stride stride, Dim dim, float* out) {
  Part parts[R][K] = {};
  auto add = [&](int d, auto load) {
    Part keys[K];
#pragma GCC unroll 8
    for (int b = 0; b < K; b++) keys[b] = load(k + static_cast<size_t>(b) * stride + d);
#pragma GCC unroll 4
    for (int a = 0; a < R; a++) {
      const Part row = load(q + static_cast<size_t>(a) * stride + d);
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

// A block of keys and values, and the keys that come next.
template <class Number>
struct KeyBlock {
  KeyBlock(const Paged<Number>& paged, int base, int keys) {
    const size_t at = paged.at(base);
    this->keys = paged.keys + at;
    values = paged.values + at;
    next = base + kKeyBlock < keys ? paged.keys + paged.at(base + kKeyBlock) : this->keys;
  }

  const Number *keys, *values, *next;
};

// With few rows, keys and values are waited for: keys are asked for that many bytes ahead, some of them in the next block,
// and the values of a key when it is scored.
constexpr size_t kAhead = 4096;

template <int R, class Number>
void scored(const float* q, const KeyBlock<Number>& block, int lo, int hi, int dim, float* scores) {
  constexpr int K = R == 1 ? 8 : 4;
  const size_t whole = static_cast<size_t>(kKeyBlock) * dim;
  int j = lo;
  for (; j + K <= hi; j += K) {
    const size_t at = static_cast<size_t>(j) * dim, soon = at + kAhead / sizeof(Number);
    ask_for(soon < whole ? block.keys + soon : block.next + (soon - whole), static_cast<size_t>(K) * dim);
    ask_for(block.values + at, static_cast<size_t>(K) * dim);
    few_scores<R, K>(q, block.keys + at, dim, dim, scores + j);
  }
  for (; j < hi; j++) few_scores<R, 1>(q, block.keys + static_cast<size_t>(j) * dim, dim, dim, scores + j);
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
void scored_apart(const float* q, int rows, const KeyBlock<Number>& block, int lo, int hi, int dim, float* scores) {
  in_fours(rows, [&](size_t row, auto count) {
    scored<decltype(count)::value>(q + row * dim, block, lo, hi, dim, scores + row * kKeyBlock);
  });
}

// The sums of some leaves of kRows rows, turned around, with a panel of keys, turned around.
template <int First, int Count>
INGOT_INLINE inline void leaf_sums(const float* q, const float* keys, int dim, Vec (&sums)[kRows][2]) {
  if constexpr (Count > 1) {
    Vec others[kRows][2];
    leaf_sums<First, Count / 2>(q, keys, dim, others);
    leaf_sums<First + Count / 2, Count / 2>(q, keys, dim, sums);
#pragma GCC unroll 8
    for (int a = 0; a < kRows; a++)
      for (int b = 0; b < 2; b++) sums[a][b] = others[a][b] + sums[a][b];
  } else {
#pragma GCC unroll 8
    for (int a = 0; a < kRows; a++) sums[a][0] = sums[a][1] = Vec{};
    for (int d = kLeaves[First]; d < dim; d += kParts) {
      const Vec one = loaded<Vec>(keys + static_cast<size_t>(d) * kPanel);
      const Vec two = loaded<Vec>(keys + static_cast<size_t>(d) * kPanel + kVector);
      const float* values = q + static_cast<size_t>(d) * kRows;
#pragma GCC unroll 8
      for (int a = 0; a < kRows; a++) {
        sums[a][0] = fused(one, values[a], sums[a][0]);
        sums[a][1] = fused(two, values[a], sums[a][1]);
      }
    }
  }
}

inline void panel_scores(const float* q, const float* keys, int dim, float* out) {
  Vec scores[kRows][2];
  leaf_sums<0, kParts>(q, keys, dim, scores);
#pragma GCC unroll 8
  for (int a = 0; a < kRows; a++)
    for (int b = 0; b < 2; b++) stored(out + static_cast<size_t>(a) * kKeyBlock + b * kVector, scores[a][b]);
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

// The keys [begin, begin + kPanel), which lie `stride` apart, value by value; those outside [lo, hi) are zero.
template <class Number>
void turn_keys(const Number* k, int begin, int lo, int hi, int dim, int stride, float* panel) {
  for (int j = 0; j < kPanel; j += 4) {
    const int key = begin + j;
    const Number* from = k + static_cast<ptrdiff_t>(key) * stride;
    int d = 0;
    if (key >= lo && key + 4 <= hi)
      for (; d + 4 <= dim; d += 4) turn(from + d, stride, panel + static_cast<size_t>(d) * kPanel + j);
    for (; d < dim; d++)
      for (int i = 0; i < 4; i++)
        panel[static_cast<size_t>(d) * kPanel + j + i] =
            key + i >= lo && key + i < hi ? value(from[static_cast<ptrdiff_t>(i) * stride + d]) : 0.0f;
  }
}

template <class Number>
void scored_together(const float* q, int rows, const Number* k, int lo, int hi, int dim, float* panel, float* scores) {
  for (int begin = lo / kPanel * kPanel; begin < hi; begin += kPanel) {
    turn_keys(k, begin, lo, hi, dim, dim, panel);
    for (int row = 0; row < rows; row += kRows)
      panel_scores(q + static_cast<size_t>(row) * dim, panel, dim, scores + static_cast<size_t>(row) * kKeyBlock + begin);
  }
}

template <class F>
inline F capped(F score, float cap) {
  const F e = exponential<F>(-2.0f * magnitude(score / cap)), size = cap * ((1.0f - e) / (1.0f + e));
  return score < 0.0f ? -size : size;
}

// join(a, b) of all lanes, in pairs, pairs of pairs and so on.
template <int N = kVector / 2, class Join>
inline Vec joined(Vec v, const Join& join) {
  IntegerVec order;
#pragma GCC unroll 16
  for (int i = 0; i < kVector; i++) order[i] = i ^ N;
  const Vec both = join(v, __builtin_shuffle(v, order));
  if constexpr (N > 1)
    return joined<N / 2>(both, join);
  else
    return both;
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// A row's scores of a whole block become weights. Gives what earlier sums are worth now.
inline float weighed(float* scores, float& largest, float& sum) {
  constexpr int kVectors = kKeyBlock / kVector;
  Vec most = loaded<Vec>(scores);
#pragma GCC unroll 16
  for (int i = 1; i < kVectors; i++) most = larger(most, loaded<Vec>(scores + i * kVector));
  const float before = largest, now = std::max(before, joined(most, larger)[0]);
  Vec sums[4] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; i++) {
    const Vec weights = share(loaded<Vec>(scores + i * kVector) - now);
    sums[i % 4] += weights;
    stored(scores + i * kVector, weights);
  }
  const float own = joined((sums[0] + sums[1]) + (sums[2] + sums[3]), [](Vec a, Vec b) { return a + b; })[0];
  // Most blocks do not have the largest score so far.
  const float worth = now == before ? 1.0f : share(before - now);
  largest = now;
  sum = sum * worth + own;
  return worth;
}

// The same, of the scores [lo, hi) alone: all others become 0.
float weighed(float* scores, int lo, int hi, float cap, float& largest, float& sum) {
  if (cap > 0)
    for (int j = lo / kVector * kVector; j < hi; j += kVector) stored(scores + j, capped(loaded<Vec>(scores + j), cap));
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + lo, kNothing);
  std::fill(scores + hi, scores + kKeyBlock, kNothing);
  const float worth = weighed(scores, largest, sum);
  std::fill(scores, scores + lo, 0.0f);
  std::fill(scores + hi, scores + kKeyBlock, 0.0f);
  return worth;
}

// sums = sums * worth + weights . values, for R rows and W vectors that values(j, b) gives of key j, whose sums are at place(b).
template <int R, int W, class Values, class Places>
INGOT_INLINE inline void sums_of(const float* weights, const Values& values_of, int lo, int hi, int dim, const float* worth, float* sums,
                                 const Places& place) {
  Vec parts[R][W] = {};
#pragma GCC unroll 2
  for (int j = lo; j < hi; j++) {
    Vec values[W];
#pragma GCC unroll 8
    for (int b = 0; b < W; b++) values[b] = values_of(j, b);
#pragma GCC unroll 4
    for (int a = 0; a < R; a++)
#pragma GCC unroll 8
      for (int b = 0; b < W; b++) parts[a][b] = fused(values[b], weights[static_cast<size_t>(a) * kKeyBlock + j], parts[a][b]);
  }
#pragma GCC unroll 4
  for (int a = 0; a < R; a++)
#pragma GCC unroll 8
    for (int b = 0; b < W; b++) {
      float* at = sums + static_cast<size_t>(a) * dim + place(b);
      stored(at, fused(loaded<Vec>(at), worth[a], parts[a][b]));
    }
}

constexpr auto in_order = [](int b) { return b * kVector; };

template <int R, int W, class Number>
inline void some_sums(const float* weights, const Number* v, int lo, int hi, int dim, const float* worth, float* sums) {
  auto values = [&](int j, int b) { return loaded<Vec>(v + static_cast<ptrdiff_t>(j) * dim + b * kVector); };
  sums_of<R, W>(weights, values, lo, hi, dim, worth, sums, in_order);
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

}  // namespace
}  // namespace ingot
