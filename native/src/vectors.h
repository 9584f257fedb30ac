// Vectors of floats, as wide as the instruction set has them. Plain loops over a fixed number of lanes, which the compiler
// turns into vectors without being allowed to reorder sums.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "fused.h"
#include "half.h"
#include "isa.h"

// Loops whose sums must stay in registers are spoilt by a call.
#define INGOT_INLINE __attribute__((always_inline))

namespace ingot {
namespace {  // each instruction set has its own

typedef float Vec __attribute__((vector_size(4 * kVector)));
typedef int32_t IntegerVec __attribute__((vector_size(4 * kVector)));

// body(i) for i in [0, N), as constants: arrays that are indexed by them become registers, as loops may not.
template <class Body, int... I>
INGOT_INLINE inline void repeated(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
INGOT_INLINE inline void repeated(const Body& body) {
  repeated(body, std::make_integer_sequence<int, N>{});
}

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
using Integer = std::conditional_t<std::is_same_v<F, float>, int32_t, decltype(F{} < F{})>;

// The larger of both; what is no number stays so.
inline float at_least(float x, float least) { return x < least ? least : x; }

template <class V>
inline V at_least(V x, float least) {
#if defined(__aarch64__)
  if constexpr (sizeof(V) == 16) return (V)vmaxq_f32((float32x4_t)x, vdupq_n_f32(least));
#elif defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);
#endif
  const V bound = V{} + least;
  return x < bound ? bound : x;
}

constexpr float kLeast = -86.5f;  // below it, exponents would not fit

// Relative error below 2e-7 for x from kLeast to 0; next to nothing below, which is enough for softmax.
template <class F>
inline F share(F given) {
  const F x = at_least(given, kLeast);
  // So large that its last bit is worth one: the sum's last bits are the nearest whole number.
  const F shifted = fused(x, 1.44269504f, F{} + 12582912.0f), n = shifted - 12582912.0f;
  const F r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x)), square = r * r;
  // In pairs, which do not wait for each other.
  const F first = fused(r, 1.66671142e-1f, F{} + 4.99992311e-1f), second = fused(r, 8.31252150e-3f, F{} + 4.18901592e-2f);
  const F y = fused(fused(second, square, first), square, r) + 1.0f;
  return std::bit_cast<F>(std::bit_cast<Integer<F>>(y) + (std::bit_cast<Integer<F>>(shifted) << 23));
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

template <class F>
inline F magnitude(F x) {
  return x < 0.0f ? -x : x;
}

}  // namespace
}  // namespace ingot
