// Compiled several times with different flags; INGOT_ISA names the result.
#include "recurrence.h"

#include "fused.h"
#include "isa.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ingot {
namespace {

constexpr int kLanes = kVector;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// The same for the last few of a row.
inline Vec load(const float* p, int left) {
  if (left >= kLanes) return load(p);
  Vec v{};
  std::memcpy(&v, p, sizeof(float) * left);
  return v;
}

inline void store(float* p, Vec v, int left) {
  if (left >= kLanes)
    store(p, v);
  else
    std::memcpy(p, &v, sizeof(float) * left);
}

inline float total(Vec v) {
  Ints from;
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < kLanes; i++) from[i] = i ^ half;
    v += __builtin_shuffle(v, from);
  }
  return v[0];
}

// A number for each of the rows that are computed together.
typedef float Four __attribute__((vector_size(16)));
static_assert(kStateRows == 4);

inline Four folded(Vec v) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  const Eight half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX2__)
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}

template <int R>
inline Four totals(const Vec* sums) {
  if constexpr (R == 1) {
    return Four{total(sums[0])};
  } else {
    const Four a = folded(sums[0]), b = folded(sums[1]), c = folded(sums[2]), d = folded(sums[3]);
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
    const Four cd = __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  }
}

template <int R>
inline Four load_rows(const float* p) {
  Four v{};
  std::memcpy(&v, p, sizeof(float) * R);
  return v;
}

template <int R>
inline void store_rows(float* p, Four v) {
  std::memcpy(p, &v, sizeof(float) * R);
}

// Vectors that are computed side by side, as each waits for its own last step most of the time.
constexpr int kAbreast = 4;

// e = exp(-|x|), with a relative error below 2e-7.
template <int N>
inline void falling_powers(const Vec (&x)[N], Vec (&e)[N]) {
  const Vec zero{}, least = zero - 87.0f;
  Vec r[N], y[N];
  Ints whole[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const Vec falling = x[i] < zero ? x[i] : -x[i];  // its exponential cannot overflow
    const Vec bounded = falling < least ? least : falling;
    whole[i] = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Ints);  // to the nearest, as it is not above zero
    const Vec n = __builtin_convertvector(whole[i], Vec);
    r[i] = bounded - n * 0.693359375f;
    r[i] -= n * -2.12194440e-4f;
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const Vec square = r[i] * r[i];
    const Vec high = r[i] * 1.9875691500e-4f + 1.3981999507e-3f, middle = r[i] * 8.3334519073e-3f + 4.1665795894e-2f;
    const Vec low = r[i] * 1.6666665459e-1f + 5.0000001201e-1f;
    y[i] = (high * square + middle) * square + low;
    y[i] = y[i] * square + r[i] + 1.0f;
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const Ints bits = (whole[i] + 127) << 23;
    Vec power;
    std::memcpy(&power, &bits, sizeof(power));
    e[i] = y[i] * power;
  }
}

// x = x * sigmoid(x).
template <int N>
inline void silu(Vec (&x)[N]) {
  const Vec zero{}, one = zero + 1.0f;
  Vec e[N];
  falling_powers(x, e);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] = x[i] * (x[i] < zero ? e[i] : one) / (one + e[i]);
}

// log(1 + e) for e from 0 to 1: twice the inverse hyperbolic tangent of e / (2 + e), as a series of its odd powers.
inline Vec log_one_more(Vec e) {
  const Vec s = e / (e + 2.0f), square = s * s;
  Vec sum = Vec{} + 1.0f / 15;
#pragma GCC unroll 7
  for (int odd = 13; odd > 0; odd -= 2) sum = fused(sum, square, Vec{} + 1.0f / odd);
  return 2.0f * s * sum;
}

// x becomes its decay. Neither exponent is above zero.
template <int N>
inline void decay(const DecayRule& rule, Vec (&x)[N]) {
  const Vec zero{}, one = zero + 1.0f;
  Vec e[N];
  if (rule.bounded)
    for (int i = 0; i < N; i++) x[i] = rule.rate * x[i];
  falling_powers(x, e);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    if (rule.bounded)
      x[i] = rule.bound * ((x[i] < zero ? e[i] : one) / (one + e[i]));
    else
      x[i] = rule.rate * ((x[i] < zero ? zero : x[i]) + log_one_more(e[i]));
  }
  falling_powers(x, e);
  for (int i = 0; i < N; i++) x[i] = e[i];
}

// Where a token's taps lie, oldest first; returns how many of the oldest are zeros.
inline int tapped(const Stretch& s, int taps, int token, const float** rows) {
  int missing = 0;
  for (int tap = 0; tap < taps; tap++) {
    const int at = s.before + token + tap - taps + 1;  // in the piece
    if (at >= 0)
      rows[tap] = s.x + static_cast<ptrdiff_t>(at - s.before) * static_cast<ptrdiff_t>(s.stride);
    else if (s.tail != nullptr)
      rows[tap] = s.tail + (taps - 1 + at) * s.tail_stride;
    else
      missing = tap + 1;
  }
  return missing;
}

template <int Taps, int N>  // 0 taps: as many as the filter says
inline void convolve_some(const float* const* rows, int missing, const Filter& f, int c, float* y) {
  const int taps = Taps == 0 ? f.taps : Taps;
  Vec sums[N] = {};
  if (f.bias != nullptr)
    for (int i = 0; i < N; i++) sums[i] = load(f.bias + c + i * kLanes);
#pragma GCC unroll 4
  for (int tap = missing; tap < taps; tap++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) sums[i] = fused(load(f.weight + tap * f.stride + c + i * kLanes), load(rows[tap] + c + i * kLanes), sums[i]);
  if (f.silu) silu(sums);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) store(y + c + i * kLanes, sums[i]);
}

// The same for what is left of the channels.
void convolve_rest(const float* const* rows, int missing, const Filter& f, int c, int left, float* y) {
  Vec sums[1] = {f.bias == nullptr ? Vec{} : load(f.bias + c, left)};
  for (int tap = missing; tap < f.taps; tap++)
    sums[0] = fused(load(f.weight + tap * f.stride + c, left), load(rows[tap] + c, left), sums[0]);
  if (f.silu) silu(sums);
  store(y + c, sums[0], left);
}

template <int Taps>
inline void convolve_token(const float* const* rows, int missing, const Filter& f, int size, float* y) {
  int c = 0;
  for (; c + kAbreast * kLanes <= size; c += kAbreast * kLanes) convolve_some<Taps, kAbreast>(rows, missing, f, c, y);
  for (; c + kLanes <= size; c += kLanes) convolve_some<Taps, 1>(rows, missing, f, c, y);
  if (c < size) convolve_rest(rows, missing, f, c, size - c, y);
}

constexpr int kMostTaps = 64;

void convolve(const Stretch& s, const Filter& f, float* y, size_t y_stride) {
  const float* rows[kMostTaps];
  for (int token = 0; token < s.count; token++, y += y_stride) {
    const int missing = tapped(s, f.taps, token, rows);
    if (f.taps == 4)
      convolve_token<4>(rows, missing, f, s.size, y);
    else
      convolve_token<0>(rows, missing, f, s.size, y);
  }
}

void normalise(float* x, int size, float eps, float gain) {
  Vec sum{};
  for (int i = 0; i < size; i += kLanes) {
    const Vec v = load(x + i, size - i);
    sum = fused(v, v, sum);
  }
  const float scale = gain / std::sqrt(total(sum) + eps);
  for (int i = 0; i < size; i += kLanes) store(x + i, load(x + i, size - i) * scale, size - i);
}

void decays(const DecayRule& rule, const float* x, const float* bias, int size, float* y) {
  int c = 0;
  for (; c + kAbreast * kLanes <= size; c += kAbreast * kLanes) {
    Vec some[kAbreast];
    for (int i = 0; i < kAbreast; i++) some[i] = load(x + c + i * kLanes) + load(bias + c + i * kLanes);
    decay(rule, some);
    for (int i = 0; i < kAbreast; i++) store(y + c + i * kLanes, some[i]);
  }
  for (; c < size; c += kLanes) {
    Vec one[1] = {load(x + c, size - c) + load(bias + c, size - c)};
    decay(rule, one);
    store(y + c, one[0], size - c);
  }
}

template <int R>
inline Four products(const float* s, int size, const float* k) {
  Vec sums[R] = {};
  for (int d = 0; d < size; d += kLanes) {
    const Vec kd = load(k + d);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r] = fused(load(s + static_cast<size_t>(r) * size + d), kd, sums[r]);
  }
  return totals<R>(sums);
}

// s = decay * s + update k', for R rows, with one decay or (ByKey) one for each number of a row. Gives s q; `ahead` becomes
// s `next`, which the token after it asks for.
template <int R, bool Next, bool ByKey = false>
inline Four advance(float* __restrict s, int size, const float* __restrict decay, Four update, const float* __restrict k,
                    const float* __restrict q, const float* __restrict next, Four& ahead) {
  Vec sums[R] = {}, next_sums[R] = {};
  for (int d = 0; d < size; d += kLanes) {
    const Vec kd = load(k + d), qd = load(q + d);
    Vec nd{}, decays{};
    if constexpr (Next) nd = load(next + d);
    if constexpr (ByKey)
      decays = load(decay + d);
    else
      decays = *decay - decays;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      float* at = s + static_cast<size_t>(r) * size + d;
      const Vec sd = fused(load(at), decays, kd * update[r]);
      store(at, sd);
      sums[r] = fused(sd, qd, sums[r]);
      if constexpr (Next) next_sums[r] = fused(sd, nd, next_sums[r]);
    }
  }
  if constexpr (Next) ahead = totals<R>(next_sums);
  return totals<R>(sums);
}

template <int R, bool ByKey>
inline void delta_rows(const DeltaHead& h, float* s, int size, int first) {
  const float* asked = ByKey ? h.decayed_k : h.k;
  Four seen = products<R>(s, size, asked);
  for (int t = 0; t < h.count; t++) {
    const size_t at = static_cast<size_t>(t) * size;
    const float *k = h.k + at, *q = h.q + at, *decay = h.decay + (ByKey ? at : static_cast<size_t>(t));
    const Four value = load_rows<R>(h.v + static_cast<size_t>(t) * h.values + first);
    const Four update = (value - (ByKey ? seen : *decay * seen)) * h.beta[t];
    const Four out = t + 1 < h.count ? advance<R, true, ByKey>(s, size, decay, update, k, q, asked + at + size, seen)
                                     : advance<R, false, ByKey>(s, size, decay, update, k, q, nullptr, seen);
    store_rows<R>(h.y + static_cast<size_t>(t) * h.values + first, out);
  }
}

template <int R>
inline void scan_rows(const ScanHead& h, float* s, int size, int first) {
  Four unused{};
  for (int t = 0; t < h.count; t++) {
    const Four x = load_rows<R>(h.x + static_cast<size_t>(t) * h.values + first);
    const size_t at = static_cast<size_t>(t) * size;
    const Four out = advance<R, false>(s, size, h.decay + t, h.dt[t] * x, h.b + at, h.c + at, nullptr, unused);
    store_rows<R>(h.y + t * h.y_stride + first, out + h.skip * x);
  }
}

// Calls body(rows, padded size) for R rows of a state, in memory where rows are whole vectors.
template <int R, class Body>
inline void in_vectors(float* state, int keys, float* scratch, const Body& body) {
  const int size = (keys + kLanes - 1) / kLanes * kLanes;
  if (size == keys) {
    body(state, size);
    return;
  }
  std::fill(scratch, scratch + R * size, 0.0f);
  for (int r = 0; r < R; r++) std::memcpy(scratch + r * size, state + static_cast<size_t>(r) * keys, sizeof(float) * keys);
  body(scratch, size);
  for (int r = 0; r < R; r++) std::memcpy(state + static_cast<size_t>(r) * keys, scratch + r * size, sizeof(float) * keys);
}

template <bool ByKey>
void delta_by(const DeltaHead& h) {
  int row = 0;
  auto at = [&] { return h.state + static_cast<size_t>(row) * h.keys; };
  for (; row + kStateRows <= h.values; row += kStateRows)
    in_vectors<kStateRows>(at(), h.keys, h.scratch,
                           [&](float* s, int size) { delta_rows<kStateRows, ByKey>(h, s, size, row); });
  for (; row < h.values; row++)
    in_vectors<1>(at(), h.keys, h.scratch, [&](float* s, int size) { delta_rows<1, ByKey>(h, s, size, row); });
}

void delta(const DeltaHead& h) { h.decayed_k == nullptr ? delta_by<false>(h) : delta_by<true>(h); }

void scan(const ScanHead& h) {
  int row = 0;
  auto at = [&] { return h.state + static_cast<size_t>(row) * h.keys; };
  for (; row + kStateRows <= h.values; row += kStateRows)
    in_vectors<kStateRows>(at(), h.keys, h.scratch, [&](float* s, int size) { scan_rows<kStateRows>(h, s, size, row); });
  for (; row < h.values; row++)
    in_vectors<1>(at(), h.keys, h.scratch, [&](float* s, int size) { scan_rows<1>(h, s, size, row); });
}

}  // namespace

extern const Recurrence INGOT_NAME(recurrence);
const Recurrence INGOT_NAME(recurrence) = {kLanes, convolve, delta, scan, normalise, decays};

}  // namespace ingot
