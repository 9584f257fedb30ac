// Compiled several times with different flags; INGOT_ISA names the result. Plain loops over a fixed number of lanes, as
// in floats.cpp.
#include "halves.h"

#include <bit>

#define INGOT_NAME(name) INGOT_NAME_(name, INGOT_ISA)
#define INGOT_NAME_(name, isa) INGOT_NAME__(name, isa)
#define INGOT_NAME__(name, isa) name##_##isa

namespace ingot {
namespace {

constexpr int kLanes = 8;

template <bool Brain>
inline float widened(uint16_t half) {
  const uint32_t bits = half;
  if constexpr (Brain) return std::bit_cast<float>(bits << 16);
  // The exponent's bias differs by 112; a product with a power of two is exact and takes care of subnormals.
  const float magnitude = std::bit_cast<float>((bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t unbounded = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;  // infinities and what is not a number
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | unbounded | (bits & 0x8000) << 16);
}

// M rows of x times N rows of weights.
template <bool Brain, int M, int N>
inline void products(const uint16_t* w, const float* x, int columns, float* y, size_t stride) {
  const size_t width = columns;
  float lanes[M][N][kLanes] = {};
  int d = 0;
  for (; d + kLanes <= columns; d += kLanes)
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) {
      float wide[kLanes];
      for (int l = 0; l < kLanes; l++) wide[l] = widened<Brain>(w[b * width + d + l]);
#pragma GCC unroll 4
      for (int a = 0; a < M; a++)
        for (int l = 0; l < kLanes; l++) lanes[a][b][l] += x[a * width + d + l] * wide[l];
    }
  for (int l = 0; d < columns; d++, l++)
    for (int a = 0; a < M; a++)
      for (int b = 0; b < N; b++) lanes[a][b][l] += x[a * width + d] * widened<Brain>(w[b * width + d]);
  for (int a = 0; a < M; a++)
    for (int b = 0; b < N; b++) {
      float sum = 0;
      for (int l = 0; l < kLanes; l++) sum += lanes[a][b][l];
      y[a * stride + b] = sum;
    }
}

template <bool Brain, int M, int N>
void some_rows(const uint16_t* w, const float* x, int columns, int first, int last, float* y, size_t stride) {
  int n = first;
  for (; n + N <= last; n += N) products<Brain, M, N>(w + static_cast<size_t>(n) * columns, x, columns, y + n, stride);
  for (; n < last; n++) products<Brain, M, 1>(w + static_cast<size_t>(n) * columns, x, columns, y + n, stride);
}

template <bool Brain>
void all_rows(const uint16_t* w, const float* x, int columns, int count, int first, int last, float* y, size_t stride) {
  int m = 0;
  for (; m + 4 <= count; m += 4)
    some_rows<Brain, 4, 2>(w, x + static_cast<size_t>(m) * columns, columns, first, last, y + m * stride, stride);
  for (; m + 2 <= count; m += 2)
    some_rows<Brain, 2, 2>(w, x + static_cast<size_t>(m) * columns, columns, first, last, y + m * stride, stride);
  for (; m < count; m++)
    some_rows<Brain, 1, 4>(w, x + static_cast<size_t>(m) * columns, columns, first, last, y + m * stride, stride);
}

void multiply(const HalfMatrix& w, const float* x, int columns, int count, int first, int last, float* y, size_t stride) {
  if (w.brain)
    all_rows<true>(w.values, x, columns, count, first, last, y, stride);
  else
    all_rows<false>(w.values, x, columns, count, first, last, y, stride);
}

void widen(const HalfMatrix& w, size_t first, size_t count, float* out) {
  const uint16_t* from = w.values + first;
  if (w.brain)
    for (size_t i = 0; i < count; i++) out[i] = widened<true>(from[i]);
  else
    for (size_t i = 0; i < count; i++) out[i] = widened<false>(from[i]);
}

}  // namespace

extern const Halves INGOT_NAME(halves);
const Halves INGOT_NAME(halves) = {multiply, widen};

}  // namespace ingot
