// Compiled several times with different flags; INGOT_ISA names the result.
#include "dense.h"

#include "fused.h"
#include "isa.h"

#include <bit>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ingot {
namespace {

// Lanes of a vector, and rows of weights that meet four rows of x: as many sums as registers hold.
constexpr int kLanes = kVector, kAtOnce = kVector == 8 ? 2 : 4;

// The compiler's own vectors: loops over lanes it leaves as loops where several sums are under way.
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));

template <class V, class T>
inline V loaded(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The formats of weights: one value, and as many as there are lanes.
struct Single {
  using Value = float;
  static float one(float value) { return value; }
  static Lanes lanes(const float* p) { return loaded<Lanes>(p); }
};

struct Brain {
  using Value = uint16_t;
  static float one(uint16_t half) { return std::bit_cast<float>(static_cast<uint32_t>(half) << 16); }
  static Lanes lanes(const uint16_t* p) {
#if defined(__aarch64__)
    return std::bit_cast<Lanes>(vshll_n_u16(vld1_u16(p), 16));  // one instruction, which gcc 12 does not find
#else
    return std::bit_cast<Lanes>(__builtin_convertvector(loaded<Shorts>(p), Bits) << 16);
#endif
  }
};

struct Half {
  using Value = uint16_t;
  static float one(uint16_t half) {
    const uint32_t bits = half;
    // The exponent's bias differs by 112; a product with a power of two is exact and takes care of subnormals.
    const float magnitude = std::bit_cast<float>((bits & 0x7fff) << 13) * 0x1p112f;
    const uint32_t unbounded = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;  // infinities and what is not a number
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | unbounded | (bits & 0x8000) << 16);
  }
  static Lanes lanes(const uint16_t* p) {
#if defined(__aarch64__)
    return std::bit_cast<Lanes>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))));
#elif defined(__AVX512F__)
    return std::bit_cast<Lanes>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
    const Bits bits = __builtin_convertvector(loaded<Shorts>(p), Bits);
    const Lanes magnitude = std::bit_cast<Lanes>((bits & 0x7fff) << 13) * 0x1p112f;
    const Bits unbounded = std::bit_cast<Bits>((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return std::bit_cast<Lanes>(std::bit_cast<Bits>(magnitude) | unbounded | (bits & 0x8000) << 16);
#endif
  }
};

// M rows of x times N rows of weights, with the sums in registers.
template <class Format, int M, int N>
inline void products(const typename Format::Value* w, const float* x, size_t columns, float* y, size_t stride) {
  Lanes sums[M][N] = {};
  auto step = [&](size_t d) __attribute__((always_inline)) {
    Lanes own[M];
#pragma GCC unroll 4
    for (int a = 0; a < M; a++) own[a] = loaded<Lanes>(x + a * columns + d);
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) {
      const Lanes weights = Format::lanes(w + b * columns + d);
#pragma GCC unroll 4
      for (int a = 0; a < M; a++) sums[a][b] = fused(own[a], weights, sums[a][b]);
    }
  };
  size_t d = 0;
  if constexpr (M == 1 && sizeof(typename Format::Value) == 2) {
    constexpr size_t kLine = 32;
    for (; d + kLine <= columns; d += kLine) {
      // The rows after these: each is too short for the processor to find out in time that they are read in a row. Not
      // into the nearest cache, which would lose what it holds to rows that lie a power of two apart.
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) __builtin_prefetch(w + (b + N) * columns + d, 0, 2);
#pragma GCC unroll 8
      for (size_t i = 0; i < kLine; i += kLanes) step(d + i);
    }
  }
  for (; d + kLanes <= columns; d += kLanes) step(d);
#pragma GCC unroll 4
  for (int a = 0; a < M; a++)
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) {
      float sum = 0;
      for (int l = 0; l < kLanes; l++) sum += sums[a][b][l];
      for (size_t rest = d; rest < columns; rest++) sum = fused(x[a * columns + rest], Format::one(w[b * columns + rest]), sum);
      y[a * stride + b] = sum;
    }
}

template <class Format, int M, int N>
void some_rows(const typename Format::Value* w, const float* x, size_t columns, int first, int last, float* y,
               size_t stride) {
  int n = first;
  for (; n + N <= last; n += N) products<Format, M, N>(w + n * columns, x, columns, y + n, stride);
  for (; n < last; n++) products<Format, M, 1>(w + n * columns, x, columns, y + n, stride);
}

template <class Format>
void all_rows(const typename Format::Value* w, const float* x, size_t columns, int count, int first, int last, float* y,
              size_t stride) {
  int m = 0;
  for (; m + 4 <= count; m += 4)
    some_rows<Format, 4, kAtOnce>(w, x + m * columns, columns, first, last, y + m * stride, stride);
  for (; m + 2 <= count; m += 2)
    some_rows<Format, 2, 4>(w, x + m * columns, columns, first, last, y + m * stride, stride);
  // No more than four rows of weights: where they lie a power of two apart, caches hold no more of them.
  for (; m < count; m++) some_rows<Format, 1, 4>(w, x + m * columns, columns, first, last, y + m * stride, stride);
}

void multiply(const float* w, const float* x, int columns, int count, int first, int last, float* y, size_t stride) {
  all_rows<Single>(w, x, columns, count, first, last, y, stride);
}

void multiply_half(const HalfMatrix& w, const float* x, int columns, int count, int first, int last, float* y,
                   size_t stride) {
  if (w.brain)
    all_rows<Brain>(w.values, x, columns, count, first, last, y, stride);
  else
    all_rows<Half>(w.values, x, columns, count, first, last, y, stride);
}

template <class Format>
void widen_all(const uint16_t* from, size_t count, float* out) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes wide = Format::lanes(from + i);
    std::memcpy(out + i, &wide, sizeof(wide));
  }
  for (; i < count; i++) out[i] = Format::one(from[i]);
}

void widen(const HalfMatrix& w, size_t first, size_t count, float* out) {
  if (w.brain)
    widen_all<Brain>(w.values + first, count, out);
  else
    widen_all<Half>(w.values + first, count, out);
}

}  // namespace

extern const Dense INGOT_NAME(dense);
const Dense INGOT_NAME(dense) = {multiply, multiply_half, widen};

}  // namespace ingot
