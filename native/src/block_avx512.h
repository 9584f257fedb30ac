// Blocks of weights in vectors of AVX-512, with its products of bytes, or with pairs of them where it has none.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "planes_avx512.h"

namespace ingot {
namespace {  // each instruction set has its own

constexpr int kTile = 16;
#if defined(__AVX512VNNI__)
constexpr bool kSignedBytes = false;
#else
constexpr bool kSignedBytes = true;
#endif
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

#if defined(__AVX512VNNI__)
template <int Bits>
inline Ints plus_step(Ints sum, Bytes weights, Bytes x) {
  return _mm512_dpbusd_epi32(sum, weights, x);
}
#else
inline Ints of_pairs(Bytes pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }

// Signed weights of 8 bits: their signs go to the activations. |w| <= 128, so a pair fits in 16 bits, as it does of fewer bits.
template <int Bits>
inline Bytes pairs_of(Bytes weights, Bytes x) {
  if constexpr (Bits < 8) return _mm512_maddubs_epi16(weights, x);
  const Bytes turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), x);
  return _mm512_maddubs_epi16(_mm512_abs_epi8(weights), turned);
}

template <int Bits>
inline Ints plus_step(Ints sum, Bytes weights, Bytes x) {
  return _mm512_add_epi32(sum, of_pairs(pairs_of<Bits>(weights, x)));
}
#endif

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
        const Ints found = plus_step<Bits>(_mm512_setzero_si512(), weights, four(rests + 4 * n));
        sums[n] = _mm512_add_epi32(sums[n], _mm512_slli_epi32(found, kRestBits));
      }
    } else {
      const Bytes both = _mm512_loadu_si512(p + 64 * (step / 2)), mask = _mm512_set1_epi8(15 << kRestBits);
      const Bytes weights = _mm512_and_si512(step % 2 ? _mm512_srli_epi16(both, 4 - kRestBits) : _mm512_slli_epi16(both, kRestBits), mask);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[n] = plus_step<Bits + kRestBits>(sums[n], weights, four(rests + 4 * n));
    }
  }

 private:
#if defined(__AVX512VNNI__)
  template <int M, int First, int Last>
  Ints row(const int8_t* x) const {
    Ints a = _mm512_setzero_si512(), b = a;
#pragma GCC unroll 4
    for (int i = First; i < Last; i += 2) {
      a = plus_step<Bits>(a, w[i], four(x + 4 * M * i));
      b = plus_step<Bits>(b, w[i + 1], four(x + 4 * M * (i + 1)));
    }
    return _mm512_add_epi32(a, b);
  }
#else
  // Steps whose pairs fit in 16 bits together: of 4 bits, those of a whole block do.
  static constexpr int kFit = Bits == 8 ? 1 : std::min(kSteps, 32767 / (2 * 127 * ((1 << Bits) - 1)));

  template <int M, int First, int Last>
  Ints row(const int8_t* x) const {
    constexpr int kTogether = std::min(kFit, Last - First);
    Ints sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int begin = First; begin < Last; begin += kTogether) {
      Bytes pairs = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = begin; i < begin + kTogether; i++)
        pairs = _mm512_add_epi16(pairs, pairs_of<Bits>(w[i], four(x + 4 * M * i)));
      sum = _mm512_add_epi32(sum, of_pairs(pairs));
    }
    return sum;
  }
#endif
};

}  // namespace
}  // namespace ingot
