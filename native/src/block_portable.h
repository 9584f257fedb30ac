// Blocks of weights in plain code, for any processor.
#pragma once

#include <cstring>

#include "planes.h"

namespace ingot {
namespace {  // each instruction set has its own

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
inline Sum times(Sum a, Sum b) {
  for (int r = 0; r < kTile; r++) a.v[r] *= b.v[r];
  return a;
}
inline Sum plus(Sum sum, Sum a, Sum b) {
  for (int r = 0; r < kTile; r++) sum.v[r] += a.v[r] * b.v[r];
  return sum;
}
inline Sum numbers(Ints ints) {
  Sum sum;
  for (int r = 0; r < kTile; r++) sum.v[r] = static_cast<float>(ints.v[r]);
  return sum;
}
template <class Byte>
inline Ints widened(const Byte* p) {
  Ints ints;
  for (int r = 0; r < kTile; r++) ints.v[r] = p[r];
  return ints;
}
inline Ints low_half(Ints bytes) {
  for (int r = 0; r < kTile; r++) bytes.v[r] &= 15;
  return bytes;
}
inline Ints high_half(Ints bytes) {
  for (int r = 0; r < kTile; r++) bytes.v[r] >>= 4;
  return bytes;
}

template <int Bits>
struct Block {
  uint8_t w[kSteps][kTile][4];

  explicit Block(const uint8_t* p) {
    for (int i = 0; i < kSteps; i++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) w[i][r][t] = static_cast<uint8_t>(quantum(p, Bits, kTile, r, i, t));
  }

  template <int M, int N, int First = 0, int Last = kSteps>
  void products(const int8_t* x, Ints* sums) const {
    // A product is a hundred instructions: written out for each row, they take long to compile and gain nothing.
#pragma GCC unroll 1
    for (int n = 0; n < N; n++) sums[n] = row<M, First, Last>(x + 4 * n);
  }

  // One step of a block times rests, of N rows of a lot.
  template <int M, int N>
  static void add_rests(const uint8_t* p, int step, const int8_t* rests, Ints* sums) {
    for (int n = 0; n < N; n++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) sums[n].v[r] += quantum(p, Bits, kTile, r, step, t) * rests[4 * n + t] * kRest;
  }

 private:
  template <int M, int First, int Last>
  Ints row(const int8_t* x) const {
    Ints sum{};
    for (int i = First; i < Last; i++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) sum.v[r] += w[i][r][t] * x[4 * M * i + t];
    return sum;
  }
};

}  // namespace
}  // namespace ingot
