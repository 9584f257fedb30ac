// Blocks of weights in vectors of AVX-512, with its products of bytes.
#pragma once

#include <immintrin.h>

#include "planes_avx512.h"

namespace ingot {
namespace {  // each instruction set has its own

constexpr int kTile = 16;
constexpr bool kSignedBytes = false;
using Sum = __m512;
using Ints = __m512i;
using Bytes = __m512i;
constexpr int kMostTogether = 4;

inline Sum zero() { return _mm512_setzero_ps(); }
inline Sum load(const float* p) { return _mm512_loadu_ps(p); }
inline Sum load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(float* p, Sum sum) { _mm512_storeu_ps(p, sum); }
inline Sum plus(Sum sum, Sum a, float b) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), sum); }
inline Sum scaled(Ints product, Sum scales) { return _mm512_mul_ps(_mm512_cvtepi32_ps(product), scales); }
inline Sum times(Sum a, Sum b) { return _mm512_mul_ps(a, b); }
inline Sum plus(Sum sum, Sum a, Sum b) { return _mm512_fmadd_ps(a, b, sum); }
inline Sum numbers(Ints ints) { return _mm512_cvtepi32_ps(ints); }
inline Ints widened(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Ints widened(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Ints low_half(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi32(15)); }
inline Ints high_half(Ints bytes) { return _mm512_srli_epi32(bytes, 4); }
inline Ints four(const int8_t* x) { return _mm512_set1_epi32(step_of(x)); }

template <int Bits>
struct Block {
  Bytes w[kSteps];

  explicit Block(const uint8_t* p) { read_quanta<Bits, Vectors512>(p, w); }

  template <int M, int N, int First = 0, int Last = kSteps>
  void products(const int8_t* x, Ints* sums) const {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n] = row<M, First, Last>(x + 4 * n);
  }

  // One step of a block times rests, of N rows of a lot.
  template <int M, int N>
  static void add_rests(const uint8_t* p, int step, const int8_t* rests, Ints* sums) {
    if constexpr (Bits != 4) {
      const Bytes weights = read_step<Bits, Vectors512>(p, step);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        const Ints found = _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights, four(rests + 4 * n));
        sums[n] = _mm512_add_epi32(sums[n], _mm512_slli_epi32(found, kRestBits));
      }
    } else {
      const Bytes both = _mm512_loadu_si512(p + 64 * (step / 2)), mask = _mm512_set1_epi8(15 << kRestBits);
      const Bytes weights = _mm512_and_si512(step % 2 ? _mm512_srli_epi16(both, 4 - kRestBits) : _mm512_slli_epi16(both, kRestBits), mask);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[n] = _mm512_dpbusd_epi32(sums[n], weights, four(rests + 4 * n));
    }
  }

 private:
  template <int M, int First, int Last>
  Ints row(const int8_t* x) const {
    Ints a = _mm512_setzero_si512(), b = a;
#pragma GCC unroll 4
    for (int i = First; i < Last; i += 2) {
      a = _mm512_dpbusd_epi32(a, w[i], four(x + 4 * M * i));
      b = _mm512_dpbusd_epi32(b, w[i + 1], four(x + 4 * M * (i + 1)));
    }
    return _mm512_add_epi32(a, b);
  }
};

}  // namespace
}  // namespace ingot
