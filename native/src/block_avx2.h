// Blocks of weights in vectors of AVX2.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "planes.h"

namespace ingot {
namespace {  // each instruction set has its own

constexpr int kTile = 8;
constexpr bool kSignedBytes = true;
using Sum = __m256;
using Ints = __m256i;
using Bytes = __m256i;
constexpr int kMostTogether = 4;

inline Sum zero() { return _mm256_setzero_ps(); }
inline Sum load(const float* p) { return _mm256_loadu_ps(p); }
inline Sum load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(float* p, Sum sum) { _mm256_storeu_ps(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), sum); }
inline Sum scaled(Ints product, Sum scales) { return _mm256_mul_ps(_mm256_cvtepi32_ps(product), scales); }
inline Sum times(Sum a, Sum b) { return _mm256_mul_ps(a, b); }
inline Sum plus(Sum sum, Sum a, Sum b) { return _mm256_fmadd_ps(a, b, sum); }
inline Sum numbers(Ints ints) { return _mm256_cvtepi32_ps(ints); }
inline Ints widened(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Ints widened(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Ints low_half(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi32(15)); }
inline Ints high_half(Ints bytes) { return _mm256_srli_epi32(bytes, 4); }
inline Ints four(const int8_t* x) { return _mm256_set1_epi32(step_of(x)); }

struct Vectors256 {
  static Bytes bytes_at(const uint8_t* p, int n) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * n)); }
  template <int Shift, int Mask>
  static Bytes field(Bytes v) {
    // Of 16 bits: what a byte gets from its neighbour, the mask takes away.
    if constexpr (Shift > 0) v = _mm256_srli_epi16(v, Shift);
    if constexpr (Shift < 0) v = _mm256_slli_epi16(v, -Shift);
    return _mm256_and_si256(v, _mm256_set1_epi8(Mask));
  }
  static Bytes joined(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
};

template <int Bits>
struct Block {
  Bytes w[kSteps];

  explicit Block(const uint8_t* p) { read_quanta<Bits, Vectors256>(p, w); }

  template <int M, int N, int First = 0, int Last = kSteps>
  void products(const int8_t* x, Ints* sums) const {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n] = row<M, First, Last>(x + 4 * n);
  }

  // One step of a block times rests, of N rows of a lot.
  template <int M, int N>
  static void add_rests(const uint8_t* p, int step, const int8_t* rests, Ints* sums) {
    const Bytes weights = read_step<Bits, Vectors256>(p, step);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
      sums[n] = _mm256_add_epi32(sums[n], _mm256_slli_epi32(one_step(weights, rests + 4 * n), kRestBits));
  }

 private:
  // Signed times signed: the sign of the weight goes to the activation. |w| <= 128, so a pair fits in 16 bits.
  static Ints one_step(Bytes weights, const int8_t* x) {
    const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four(x), weights));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }

  // Steps whose pairs fit in 16 bits together: of 4 bits, those of a whole block do.
  static constexpr int kFit = std::min(kSteps, 32767 / (2 * 127 * ((1 << Bits) - 1)));

  template <int M, int First, int Last>
  Ints row(const int8_t* x) const {
    Ints sum = _mm256_setzero_si256();
    if constexpr (Bits == 8) {
#pragma GCC unroll 8
      for (int i = First; i < Last; i++) sum = _mm256_add_epi32(sum, one_step(w[i], x + 4 * M * i));
    } else {
      constexpr int kTogether = std::min(kFit, Last - First);
#pragma GCC unroll 4
      for (int begin = First; begin < Last; begin += kTogether) {
        Ints pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = begin; i < begin + kTogether; i++)
          pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[i], four(x + 4 * M * i)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      }
    }
    return sum;
  }
};

}  // namespace
}  // namespace ingot
