// Numbers of the kinds that keys and values are kept in, as vectors of floats and back. A type each: float, Half and Brain.
#pragma once

#include "codes.h"
#include "hadamard.h"
#include "vectors.h"

namespace ingot {

// The nearest one, and of two the even one; what is no number stays so. For a number's bits, or for many numbers'.
template <class Bits>
static inline Bits brain_bits(Bits bits) {
  const Bits nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : nearest;
}

static inline Brain brain_of(float number) { return {static_cast<uint16_t>(brain_bits(std::bit_cast<uint32_t>(number)))}; }

namespace {  // each instruction set has its own

typedef uint32_t UnsignedVec __attribute__((vector_size(4 * kVector)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kVector)));

template <class V>
inline V loaded(const Brain* from) {
  ShortVec shorts;
  __builtin_memcpy(&shorts, from, sizeof shorts);
  return (V)(__builtin_convertvector(shorts, UnsignedVec) << 16);
}

inline void stored(Brain* to, Vec v) {
  const ShortVec shorts = __builtin_convertvector(brain_bits(std::bit_cast<UnsignedVec>(v)), ShortVec);
  __builtin_memcpy(to, &shorts, sizeof shorts);
}

inline void stored(Half* to, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)v, 0));
#elif defined(__aarch64__)
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  for (int i = 0; i < kVector; i++) to[i] = half_of(v[i]);
#endif
}

inline void put(float& to, float number) { to = number; }
inline void put(Half& to, float number) { to = half_of(number); }
inline void put(Brain& to, float number) { to = brain_of(number); }

// body(numbers) with the numbers' own type.
template <class Body>
inline void as_kind(const Vectors& vectors, const Body& body) {
  switch (vectors.kind) {
    case Number::single: return body(static_cast<float*>(vectors.numbers));
    case Number::half: return body(static_cast<Half*>(vectors.numbers));
    case Number::brain: return body(static_cast<Brain*>(vectors.numbers));
  }
}

}  // namespace
}  // namespace ingot
