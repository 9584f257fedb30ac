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
constexpr int kParts = 4;                                // sums that a score is made of
constexpr int kSharing = kVector / kParts;               // keys whose parts fill a vector
constexpr int kPacked = 12;                              // rows from which it pays to turn the keys around

// A score is always the sum of the same parts, part p being that of the dims p, p + kParts and so on, added up as
// (0 + 2) + (1 + 3), so that it does not depend on the function that computes it.

// The lanes of two vectors that choose(lane) names, those of the second from kVector on.
template <class Choose>
INGOT_INLINE inline Vec chosen(Vec a, Vec b, const Choose& choose) {
  IntegerVec order;
#pragma GCC unroll 16
  for (int i = 0; i < kVector; i++) order[i] = choose(i);
  return __builtin_shuffle(a, b, order);
}

// Of each N lanes the first, of one vector and then of the other; and the second.
template <int N>
INGOT_INLINE inline Vec first_halves(Vec a, Vec b) {
  return chosen(a, b, [](int i) { return i & N ? i - N + kVector : i; });
}
template <int N>
INGOT_INLINE inline Vec second_halves(Vec a, Vec b) {
  return chosen(a, b, [](int i) { return i & N ? i + kVector : i + N; });
}

// From rows to columns.
template <int N = kVector / 2>
INGOT_INLINE inline void turn(Vec (&square)[kVector]) {
  repeated<kVector / 2>([&](auto pair) INGOT_INLINE {
    constexpr int i = pair / N * 2 * N + pair % N;
    const Vec a = square[i], b = square[i + N];
    square[i] = first_halves<N>(a, b);
    square[i + N] = second_halves<N>(a, b);
  });
  if constexpr (N > 1) turn<N / 2>(square);
}

// Some dims of kSharing keys, a key in a vector, become the first four of all, the next four and so on.
INGOT_INLINE inline void share_out([[maybe_unused]] Vec (&keys)[kSharing]) {
#if defined(__AVX512F__)
  auto two = [](__m512 a, __m512 b, auto which) { return _mm512_shuffle_f32x4(a, b, which); };
  constexpr std::integral_constant<int, 0x44> kLow;
  constexpr std::integral_constant<int, 0xee> kHigh;
  constexpr std::integral_constant<int, 0x88> kEven;
  constexpr std::integral_constant<int, 0xdd> kOdd;
  const __m512 a = two(keys[0], keys[1], kLow), b = two(keys[2], keys[3], kLow);
  const __m512 c = two(keys[0], keys[1], kHigh), d = two(keys[2], keys[3], kHigh);
  keys[0] = two(a, b, kEven), keys[1] = two(a, b, kOdd), keys[2] = two(c, d, kEven), keys[3] = two(c, d, kOdd);
#elif defined(__AVX2__)
  const Vec a = first_halves<4>(keys[0], keys[1]), b = second_halves<4>(keys[0], keys[1]);
  keys[0] = a, keys[1] = b;
#endif
}

// Four dims, for all keys that share a vector.
INGOT_INLINE inline Vec repeated_four(const float* four) {
#if defined(__AVX512F__)
  return (Vec)_mm512_broadcast_f32x4(_mm_loadu_ps(four));
#elif defined(__AVX2__)
  return (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(four));
#else
  return loaded<Vec>(four);
#endif
}

// Of four vectors of parts, the scores: of the first keys of all of them, then of the second ones.
INGOT_INLINE inline Vec totals(const Vec* parts) {
  auto interleaved = [](Vec a, Vec b, int from) {
    return chosen(a, b, [from](int i) { return i / 4 * 4 + i % 4 / 2 + from + i % 2 * kVector; });
  };
  auto paired = [](Vec a, Vec b, int from) {
    return chosen(a, b, [from](int i) { return i / 4 * 4 + i % 2 + from + i % 4 / 2 * kVector; });
  };
  const Vec a = interleaved(parts[0], parts[1], 0) + interleaved(parts[0], parts[1], 2);
  const Vec b = interleaved(parts[2], parts[3], 0) + interleaved(parts[2], parts[3], 2);
  return paired(a, b, 0) + paired(a, b, 2);
}

// As many numbers as there are left, up to a vector of them; nought beyond.
template <class Number>
inline Vec some_numbers(const Number* from, int left) {
  if (left >= kVector) return loaded<Vec>(from);
  Vec some{};
  for (int i = 0; i < left; i++) some[i] = value(from[i]);
  return some;
}

// Keys that R rows are scored with at once.
template <int R>
constexpr int kScored = R == 1 && kSharing == 1 ? 2 * kVector : kVector;

// Scores of R rows, which lie `stride` apart, with kScored<R> keys, which key(i) gives, over the first `dim` dims of each. Both
// numbers may be constants, with which no loop is left. meanwhile() comes before each vector of dims.
template <int R, class Key, class Stride, class Dim, class Meanwhile>
inline void few_scores(const float* q, const Key& key, Stride stride, Dim dim, float* out, const Meanwhile& meanwhile) {
  constexpr int K = kScored<R>, B = K / kSharing;
  Vec parts[R][B] = {};
  auto add = [&](int d, auto load, const float* q, int stride) INGOT_INLINE {
    meanwhile();
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) {
      Vec keys[kSharing];
#pragma GCC unroll 4
      for (int i = 0; i < kSharing; i++) keys[i] = load(key(b / 4 * kVector + 4 * i + b % 4) + d);
      share_out(keys);
#pragma GCC unroll 4
      for (int i = 0; i < kSharing; i++)
#pragma GCC unroll 4
        for (int a = 0; a < R; a++) {
          const Vec row = repeated_four(q + static_cast<size_t>(a) * stride + kParts * i);
          parts[a][b] = fused(row, keys[i], parts[a][b]);
        }
    }
  };
  int d = 0;
  for (; d + kVector <= dim; d += kVector) add(d, [](const auto* from) { return loaded<Vec>(from); }, q + d, stride);
  if (const int left = dim - d; left > 0) {
    float rest[R * kVector];
    for (int a = 0; a < R; a++) stored(rest + a * kVector, some_numbers(q + static_cast<size_t>(a) * stride + d, left));
    add(d, [left](const auto* from) { return some_numbers(from, left); }, rest, kVector);
  }
#pragma GCC unroll 4
  for (int a = 0; a < R; a++)
#pragma GCC unroll 2
    for (int b = 0; b < B; b += 4) stored(out + static_cast<size_t>(a) * kKeyBlock + b / 4 * kVector, totals(parts[a] + b));
}

// Bytes that are read soon. They are asked for a few lines at a time while something is computed: many at once would be waited for.
struct Soon {
  static constexpr int kLine = 64;
  const uint8_t *at, *end;

  INGOT_INLINE inline void ask(int bytes = kLine) {
    for (; bytes > 0 && at < end; bytes -= kLine, at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

template <class Number>
inline Soon soon_read(const Number* from, size_t bytes) {
  const uint8_t* at = reinterpret_cast<const uint8_t*>(from);
  return {at, at + bytes};
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
  constexpr int K = kScored<R>;
  const size_t whole = static_cast<size_t>(kKeyBlock) * dim;
  for (int j = lo / K * K; j < hi; j += K) {
    const size_t at = static_cast<size_t>(j) * dim, ahead = at + kAhead / sizeof(Number), bytes = K * sizeof(Number) * dim;
    Soon keys = soon_read(ahead < whole ? block.keys + ahead : block.next + (ahead - whole), bytes);
    Soon values = soon_read(block.values + at, bytes);
    auto ask = [&]() INGOT_INLINE {
      keys.ask(K * sizeof(Number) * kVector);
      values.ask(K * sizeof(Number) * kVector);
    };
    if (j >= lo && j + K <= hi) {
      auto key = [from = block.keys + at, dim](int i) { return from + static_cast<size_t>(i) * dim; };
      few_scores<R>(q, key, dim, dim, scores + j, ask);
    } else {  // others again instead of those that are not seen
      auto key = [&](int i) { return block.keys + static_cast<size_t>(std::clamp(j + i, lo, hi - 1)) * dim; };
      few_scores<R>(q, key, dim, dim, scores + j, ask);
    }
  }
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

// Where a panel has a dim of its keys: what a part is made of lies behind one another.
INGOT_INLINE inline size_t in_panel(int d, int dim) {
  return static_cast<size_t>(d % kParts * ((dim + kParts - 1) / kParts) + d / kParts) * kPanel;
}

// A part's sums of kRows rows, turned around, with a panel of keys.
INGOT_INLINE inline void part_sums(const float* q, const float* panel, int part, int dim, Vec (&sums)[kRows][2]) {
#pragma GCC unroll 8
  for (int a = 0; a < kRows; a++) sums[a][0] = sums[a][1] = Vec{};
  const float* keys = panel + in_panel(part, dim);
#pragma GCC unroll 4
  for (int d = part; d < dim; d += kParts, keys += kPanel) {
    const Vec one = loaded<Vec>(keys), two = loaded<Vec>(keys + kVector);
    const float* values = q + static_cast<size_t>(d) * kRows;
#pragma GCC unroll 8
    for (int a = 0; a < kRows; a++) {
      sums[a][0] = fused(one, values[a], sums[a][0]);
      sums[a][1] = fused(two, values[a], sums[a][1]);
    }
  }
}

INGOT_INLINE inline void add_up(const Vec (&others)[kRows][2], Vec (&sums)[kRows][2]) {
#pragma GCC unroll 8
  for (int a = 0; a < kRows; a++)
    for (int b = 0; b < 2; b++) sums[a][b] = others[a][b] + sums[a][b];
}

inline void panel_scores(const float* q, const float* panel, int dim, float* out) {
  Vec scores[kRows][2], even[kRows][2], odd[kRows][2];
  part_sums(q, panel, 0, dim, even);
  part_sums(q, panel, 2, dim, scores);
  add_up(scores, even);
  part_sums(q, panel, 1, dim, odd);
  part_sums(q, panel, 3, dim, scores);
  add_up(odd, scores);
  add_up(even, scores);
#pragma GCC unroll 8
  for (int a = 0; a < kRows; a++)
    for (int b = 0; b < 2; b++) stored(out + static_cast<size_t>(a) * kKeyBlock + b * kVector, scores[a][b]);
}

// As many dims, from `d` on, of as many keys as a vector has numbers, for a panel; given(i) are those of a key.
template <class Given>
INGOT_INLINE inline void turn_square(const Given& given, int d, int dim, float* panel) {
  Vec square[kVector];
  repeated<kVector>([&](auto i) INGOT_INLINE { square[i] = given(i); });
  turn(square);
  repeated<kVector>([&](auto i) INGOT_INLINE {
    if (d + i < dim) stored(panel + in_panel(d + i, dim), square[i]);
  });
}

// The keys [begin, begin + kPanel), which lie `stride` apart; those outside [lo, hi) are zero.
template <class Number>
void turn_keys(const Number* k, int begin, int lo, int hi, int dim, int stride, float* panel) {
  for (int j = 0; j < kPanel; j += kVector, begin += kVector) {
    const bool whole = begin >= lo && begin + kVector <= hi;
    for (int d = 0; d < dim; d += kVector) {
      const Number* from = k + static_cast<ptrdiff_t>(begin) * stride + d;
      if (whole && d + kVector <= dim) {
        turn_square([=](int i) INGOT_INLINE { return loaded<Vec>(from + static_cast<ptrdiff_t>(i) * stride); }, d, dim, panel + j);
      } else {
        auto some = [=](int i) {
          const bool seen = begin + i >= lo && begin + i < hi;
          return seen ? some_numbers(from + static_cast<ptrdiff_t>(i) * stride, dim - d) : Vec{};
        };
        turn_square(some, d, dim, panel + j);
      }
    }
  }
}

// The block's values and the next one's keys are asked for meanwhile.
template <class Number>
void scored_together(const float* q, int rows, const KeyBlock<Number>& block, int lo, int hi, int dim, float* panel, float* scores) {
  const int bytes = kKeyBlock * dim * static_cast<int>(sizeof(Number)), panels = (hi - lo / kPanel * kPanel + kPanel - 1) / kPanel;
  const int tiles = panels * ((rows + kRows - 1) / kRows);
  Soon values = soon_read(block.values, bytes), next = soon_read(block.next, bytes);
  for (int begin = lo / kPanel * kPanel; begin < hi; begin += kPanel) {
    turn_keys(block.keys, begin, lo, hi, dim, dim, panel);
    for (int row = 0; row < rows; row += kRows) {
      values.ask(bytes / tiles + 1);
      next.ask(bytes / tiles + 1);
      panel_scores(q + static_cast<size_t>(row) * dim, panel, dim, scores + static_cast<size_t>(row) * kKeyBlock + begin);
    }
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

constexpr int kVectors = kKeyBlock / kVector;  // of a row's scores
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline Vec largest_lanes(const float* scores) {
  Vec most = loaded<Vec>(scores);
#pragma GCC unroll 16
  for (int i = 1; i < kVectors; i++) most = larger(most, loaded<Vec>(scores + i * kVector));
  return most;
}

// Scores become weights, as if `now` were 0. Gives lanes of their sum.
INGOT_INLINE inline Vec become_weights(float* scores, float now) {
  Vec sums[4] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; i++) {
    const Vec weights = share(loaded<Vec>(scores + i * kVector) - now);
    sums[i % 4] += weights;
    stored(scores + i * kVector, weights);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

inline Vec sum_of(Vec a, Vec b) { return a + b; }

// A row's scores of a whole block become weights; `worth` is what earlier sums are worth now.
inline void weigh(float* scores, float* largest, float* total, float* worth) {
  const float before = *largest, now = std::max(before, joined(largest_lanes(scores), larger)[0]);
  const float own = joined(become_weights(scores, now), sum_of)[0];
  *worth = share(before - now);
  *largest = now;
  *total = fused(*total, *worth, own);
}

typedef float Four __attribute__((vector_size(16)));

// join(a, b) of all lanes of each of four vectors, in the order of `joined`.
template <class Join>
INGOT_INLINE inline Four four_joined(const Vec (&rows)[4], const Join& join) {
  constexpr int N = kVector / 2, M = N / 2;
  auto both = [&](auto n, Vec a, Vec b) INGOT_INLINE { return join(first_halves<n>(a, b), second_halves<n>(a, b)); };
  constexpr std::integral_constant<int, N> kHalf;
  constexpr std::integral_constant<int, M> kQuarter;
  Vec all = both(kQuarter, both(kHalf, rows[0], rows[1]), both(kHalf, rows[2], rows[3]));
  if constexpr (M > 1) all = joined<M / 2>(all, join);
  return Four{all[0], all[N], all[M], all[N + M]};
}

// The same of four rows, which need not wait for each other.
inline void weigh_four(float* scores, float* largest, float* total, float* worth) {
  Vec lanes[4];
  repeated<4>([&](auto a) INGOT_INLINE { lanes[a] = largest_lanes(scores + a * kKeyBlock); });
  const Four before = loaded<Four>(largest), most = four_joined(lanes, larger), now = before > most ? before : most;
  repeated<4>([&](auto a) INGOT_INLINE { lanes[a] = become_weights(scores + a * kKeyBlock, now[int{a}]); });
  const Four own = four_joined(lanes, sum_of), left = share(before - now);
  stored(worth, left);
  stored(largest, now);
  stored(total, fused(loaded<Four>(total), left, own));
}

// Scores become `given` but for [lo, hi).
inline void clear_around(float* scores, int lo, int hi, float given) {
  std::fill(scores, scores + lo, given);
  std::fill(scores + hi, scores + kKeyBlock, given);
}

// The scores of R rows become weights, of which row a sees [from(a), until(a)); all others become 0.
template <int R, class Sees>
void weighed(float* scores, const Sees& sees, float cap, float* largest, float* total, float* worth) {
  bool whole = R == 4;
  for (int a = 0; a < R; a++) {
    const auto [lo, hi] = sees(a);
    float* own = scores + a * kKeyBlock;
    whole = whole && lo < hi;
    if (cap > 0)
      for (int j = 0; j < kKeyBlock; j += kVector) stored(own + j, capped(loaded<Vec>(own + j), cap));
    if (lo < hi) clear_around(own, lo, hi, kNothing);
  }
  if constexpr (R == 4)
    if (whole) weigh_four(scores, largest, total, worth);
  for (int a = 0; a < R; a++) {
    const auto [lo, hi] = sees(a);
    float* own = scores + a * kKeyBlock;
    if (lo >= hi) {
      worth[a] = 1.0f;
      std::fill(own, own + kKeyBlock, 0.0f);
      continue;
    }
    if (!whole) weigh(own, largest + a, total + a, worth + a);
    clear_around(own, lo, hi, 0.0f);
  }
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

// Values of `count` dims that lie `stride` apart; the sums lie `dim` apart.
template <int R, class Number>
void summed(const float* weights, const Number* v, int stride, int lo, int hi, int count, const float* worth, float* sums, int dim) {
  int d = 0;
  auto some = [&](auto wide) INGOT_INLINE {
    constexpr int W = decltype(wide)::value;
    for (; d + W * kVector <= count; d += W * kVector) {
      auto values = [=](int j, int b) INGOT_INLINE { return loaded<Vec>(v + d + static_cast<ptrdiff_t>(j) * stride + b * kVector); };
      sums_of<R, W>(weights, values, lo, hi, dim, worth, sums + d, in_order);
    }
  };
  // One row alone needs more sums to keep the units busy.
  if constexpr (R == 1) some(std::integral_constant<int, 2 * kWide>{});
  some(std::integral_constant<int, kWide>{});
  some(std::integral_constant<int, 1>{});
  for (; d < count; d++)
    for (int a = 0; a < R; a++) {
      float part = 0;
      for (int j = lo; j < hi; j++) part = fused(value(v[static_cast<ptrdiff_t>(j) * stride + d]), weights[static_cast<size_t>(a) * kKeyBlock + j], part);
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
