// Blocks of weights in plain code, for any processor.
#pragma once

#include <cstring>

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

template <int Bits>
struct Block {
  uint8_t w[kSteps][kTile][4];

  explicit Block(const uint8_t* p) {
    for (int i = 0; i < kSteps; i++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) w[i][r][t] = static_cast<uint8_t>(quantum(p, i, r, t));
  }

  template <int M, int N>
  void products(const int8_t* x, Ints* sums) const {
    // A product is a hundred instructions: written out for each row, they take long to compile and gain nothing.
#pragma GCC unroll 1
    for (int n = 0; n < N; n++) sums[n] = row<M>(x + 4 * n);
  }

  // One step of a block times rests, of N rows of a lot.
  template <int M, int N>
  static void add_rests(const uint8_t* p, int step, const int8_t* rests, Ints* sums) {
    for (int n = 0; n < N; n++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) sums[n].v[r] += quantum(p, step, r, t) * rests[4 * n + t] * kRest;
  }

 private:
  static int quantum(const uint8_t* p, int step, int row, int t) {
    if constexpr (Bits == 8) return p[(step * kTile + row) * 4 + t];
    return p[(step / 2 * kTile + row) * 4 + t] >> (step % 2 * 4) & 15;
  }

  template <int M>
  Ints row(const int8_t* x) const {
    Ints sum{};
    for (int i = 0; i < kSteps; i++)
      for (int r = 0; r < kTile; r++)
        for (int t = 0; t < 4; t++) sum.v[r] += w[i][r][t] * x[4 * M * i + t];
    return sum;
  }
};

}  // namespace
}  // namespace ingot
