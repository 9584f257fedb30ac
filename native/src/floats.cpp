// Compiled several times with different flags; INGOT_ISA names the result.
#include "floats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "attend_block.h"
#include "attend_coded.h"
#include "vectors.h"

namespace ingot {
namespace {

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

void softmax(float* scores, int size) {
  int i = 0;
  float most = scores[0];
  if (size >= kVector) {
    Vec vector = loaded<Vec>(scores);
    for (i = kVector; i + kVector <= size; i += kVector) vector = larger(vector, loaded<Vec>(scores + i));
    most = joined(vector, larger)[0];
  }
  for (; i < size; i++) most = std::max(most, scores[i]);
  each(size, scores, [=](auto at) { return share(at(scores) - most); });
  const float inverse = 1.0f / total_of(size, [=](auto sum, auto at) { return sum + at(scores); });
  each(size, scores, [=](auto at) { return at(scores) * inverse; });
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

// Absolute error below 2e-7 for x up to a few thousand. It is the same every half turn.
template <class F>
inline F sine_squared(F x) {
  // So large that its last bit is worth one: the sum's last bits are the nearest whole number.
  const F shifted = fused(x, 0.318309886f, F{} + 12582912.0f), n = shifted - 12582912.0f;
  const F r = fused(n, 8.90890984e-6f, fused(n, -9.765625e-4f, fused(n, -3.140625f, x))), square = r * r;
  F y = fused(square, -2.50521084e-8f, F{} + 2.75573192e-6f);
  y = fused(y, square, F{} - 1.98412698e-4f);
  y = fused(y, square, F{} + 8.33333333e-3f);
  y = fused(y, square, F{} - 1.66666667e-1f);
  const F sine = fused(y * square, r, r);
  return sine * sine;
}

void snake(const float* x, const float* scale, const float* shift, const float* alpha, int size, float* y) {
  each(size, y, [=](auto at) {
    const auto value = fused(at(x), at(scale), at(shift));
    return value + sine_squared(at(alpha) * value) / at(alpha);
  });
}

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

// Rows and the queries that they are of, with the keys that the last of these sees.
struct Asking {
  const Sight& how;
  int queries, group, keys;

  int rows() const { return queries * group; }
  // Of a block's keys [lo, hi), those that a row sees.
  std::pair<int, int> sees(int row, int base, int lo, int hi) const {
    const int until = keys - queries + row / group + 1 - base;
    return {how.window > 0 ? std::max(lo, until - how.window) : lo, std::min(hi, until)};
  }
};

// What the rows find in the keys [lo, hi) of a block.
template <class Number>
void meet(const Asking& asking, const float* q, const KeyBlock<Number>& block, int base, int lo, int hi, bool packed, Tile& tile,
          Found found) {
  const int rows = asking.rows(), dim = asking.how.dim;
  if (packed)
    scored_together(q, rows, block, lo, hi, dim, tile.panel, tile.scores);
  else
    scored_apart(q, rows, block, lo, hi, dim, tile.scores);
  auto find = [&](const auto& sees) {
    auto scores = [&](int row) { return tile.scores + static_cast<size_t>(row) * kKeyBlock; };
    in_fours(rows, [&](int row, auto count) {
      weighed<decltype(count)::value>(scores(row), [&](int a) { return sees(row + a); }, asking.how.cap, found.largest + row,
                                      found.total + row, tile.worth + row);
    });
    auto sum_up = [&](const auto* values, int stride, int begin, int count) {
      in_fours(rows, [&](int row, auto some) {
        constexpr int R = decltype(some)::value;
        summed<R>(scores(row), values, stride, sees(row).first, sees(row + R - 1).second, count, tile.worth + row,
                  found.sums + static_cast<size_t>(row) * dim + begin, dim);
      });
    };
    if (!packed) return sum_up(block.values, dim, 0, dim);
    // As many as stay near while many rows pass by.
    const int step = std::min(kWide * kVector, dim);
    for (int begin = 0; begin < dim; begin += step) {
      const int count = std::min(step, dim - begin);
      for (int j = lo; j < hi; j++) widen(block.values + static_cast<ptrdiff_t>(j) * dim + begin, count, tile.values + j * step);
      sum_up(static_cast<const float*>(tile.values), step, begin, count);
    }
  };
  const std::pair all{0, kKeyBlock};
  // The first row sees the fewest of the last keys, the last one the fewest of the first.
  if (asking.sees(0, base, lo, hi) == all && asking.sees(rows - 1, base, lo, hi) == all)
    find([](int) { return std::pair{0, kKeyBlock}; });
  else
    find([&](int row) { return asking.sees(row, base, lo, hi); });
}

void find_nothing(Found found) {
  std::fill(found.sums, found.sums + static_cast<size_t>(found.rows) * found.dim, 0.0f);
  std::fill(found.largest, found.largest + found.rows, -std::numeric_limits<float>::infinity());
  std::fill(found.total, found.total + found.rows, 0.0f);
}

template <class Number>
void attend(const Sight& how, const float* q, int queries, int group, size_t stride, const Paged<Number>& paged, int keys,
            int stretch, float* scratch, Found found) {
  const Asking asking{how, queries, group, keys};
  const int rows = asking.rows(), dim = how.dim;
  const bool packed = rows >= kPacked;
  Tile tile(scratch, rows, dim);
  if (q != nullptr) take_queries(how, q, queries, group, stride, packed, tile);
  find_nothing(found);
  const int oldest = Stretches::oldest(how, queries, keys), end = std::min(keys, (stretch + 1) * kStretch);
  const int begin = std::max(oldest / kKeyBlock * kKeyBlock, stretch * kStretch);
  for (int base = begin; base < end; base += kKeyBlock) {
    const int lo = std::max(oldest - base, 0), hi = std::min(end - base, kKeyBlock);
    const KeyBlock<Number> block(paged, base, keys);
    meet(asking, tile.q, block, base, lo, hi, packed, tile, found);
  }
}

// The same where the sequence's first pages are coded. What was summed up of rotated values is turned back once.
template <class Number>
void attend_coded(const Sight& how, const float* q, int queries, int group, size_t stride, const Coded& coded,
                  const Paged<Number>& paged, int keys, int stretch, float* scratch, Found found) {
  const Asking asking{how, queries, group, keys};
  const int rows = asking.rows();
  const bool packed = rows >= kPacked, turns = is_rotated(coded.layout->values);
  Tile tile(scratch, rows, how.dim);
  const CodedTile room(tile.end, tile.padded, how.dim);
  if (q != nullptr) {
    take_queries(how, q, queries, group, stride, packed, tile);
    take_coded_queries(how, q, queries, group, stride, packed, *coded.layout, tile, room);
  }
  find_nothing(found);
  const int first = stretch * kStretch, end = std::min(keys, first + kStretch);
  const int raw = std::clamp(coded.count * kKeyBlock, first, end);
  for (int base = first; base < raw; base += kKeyBlock)
    meet_coded(coded, base / kKeyBlock, how.cap, rows, packed, tile, room, found);
  if (turns && raw > first) turn_back(coded.layout->values, found);
  for (int base = raw; base < end; base += kKeyBlock)
    meet(asking, tile.q, KeyBlock<Number>(paged, base, keys), base, 0, std::min(end - base, kKeyBlock), packed, tile, found);
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
const Floats INGOT_NAME(floats) = {rms_norm, layer_norm, add, softmax, swiglu, gated, rotate, attend<float>, attend<Half>,
                                   merge, halve, attend_coded<float>, attend_coded<Half>, snake};

}  // namespace ingot
