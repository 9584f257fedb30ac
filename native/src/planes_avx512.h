// Planes of quanta in vectors of AVX-512.
#pragma once

#include <immintrin.h>

#include "planes.h"

namespace ingot {
namespace {  // each instruction set has its own

struct Vectors512 {
  static __m512i bytes_at(const uint8_t* p, int n) { return _mm512_loadu_si512(p + 64 * n); }
  template <int Shift, int Mask>
  static __m512i field(__m512i v) {
    // Of 16 bits: what a byte gets from its neighbour, the mask takes away.
    if constexpr (Shift > 0) v = _mm512_srli_epi16(v, Shift);
    if constexpr (Shift < 0) v = _mm512_slli_epi16(v, -Shift);
    return _mm512_and_si512(v, _mm512_set1_epi8(Mask));
  }
  static __m512i joined(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
};

}  // namespace
}  // namespace ingot
