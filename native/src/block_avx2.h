// Blocks of weights in vectors of AVX2.
#pragma once

#include <immintrin.h>

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
inline Ints four(const int8_t* x) { return _mm256_set1_epi32(step_of(x)); }

template <int Bits>
struct Block {
  Bytes w[kSteps];

  explicit Block(const uint8_t* p) {
    if constexpr (Bits == 8) {
      for (int i = 0; i < kSteps; i++) w[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
    } else {
      const Bytes mask = _mm256_set1_epi8(15);
      for (int i = 0; i < kSteps / 2; i++) {
        const Bytes q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
        w[2 * i] = _mm256_and_si256(q, mask);
        w[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(q, 4), mask);
      }
    }
  }

  template <int M, int N>
  void products(const int8_t* x, Ints* sums) const {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n] = row<M>(x + 4 * n);
  }

  // One step of a block times rests, of N rows of a lot.
  template <int M, int N>
  static void add_rests(const uint8_t* p, int step, const int8_t* rests, Ints* sums) {
    const Bytes both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * (Bits == 8 ? step : step / 2)));
    const Bytes half = _mm256_and_si256(step % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
      sums[n] = _mm256_add_epi32(sums[n], _mm256_slli_epi32(one_step(Bits == 8 ? both : half, rests + 4 * n), kRestBits));
  }

 private:
  // Signed times signed: the sign of the weight goes to the activation. |w| <= 128, so a pair fits in 16 bits.
  static Ints one_step(Bytes weights, const int8_t* x) {
    const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four(x), weights));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }

  template <int M>
  Ints row(const int8_t* x) const {
    Ints sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; i++) {
      if constexpr (Bits == 4)
        // Of 4 bits, the pairs of a whole block fit in 16 together.
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[i], four(x + 4 * M * i)));
      else
        sum = _mm256_add_epi32(sum, one_step(w[i], x + 4 * M * i));
    }
    return Bits == 4 ? _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) : sum;
  }
};

}  // namespace
}  // namespace ingot
