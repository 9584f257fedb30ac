// What encoding and reading encoded vectors share: Hadamard transforms, bytes as vectors, numbers of the brain kind.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace ingot {

// bfloat16: the upper half of a float.
struct Brain {
  uint16_t bits;
};

static inline float value(Brain number) { return std::bit_cast<float>(static_cast<uint32_t>(number.bits) << 16); }

namespace {  // each instruction set has its own

// Sums and differences of numbers `Apart` from each other, within vectors.
template <int Apart, int... I>
inline Vec paired(Vec v, std::integer_sequence<int, I...>) {
  const Vec other = __builtin_shufflevector(v, v, (I ^ Apart)...);
  const Vec turned = Vec{(I & Apart ? -1.0f : 1.0f)...};
  return fused(v, turned, other);
}

template <int Apart>
inline Vec within(Vec v) {
  if constexpr (Apart < kVector)
    return within<2 * Apart>(paired<Apart>(v, std::make_integer_sequence<int, kVector>{}));
  else
    return v;
}

// The same of whole vectors.
template <int Apart, int Vectors>
INGOT_INLINE inline void across(Vec* v) {
  if constexpr (Apart < Vectors) {
    repeated<Vectors>([&](auto i) {
      if constexpr (!(i & Apart)) {
        const Vec one = v[i], other = v[i + Apart];
        v[i] = one + other;
        v[i + Apart] = one - other;
      }
    });
    across<2 * Apart, Vectors>(v);
  }
}

// A Hadamard transform, without the division that makes vectors as long as they were.
template <int Vectors>
inline void transform(float* x) {
  Vec v[Vectors];
  repeated<Vectors>([&](auto i) { v[i] = within<1>(loaded<Vec>(x + i * kVector)); });
  across<1, Vectors>(v);
  repeated<Vectors>([&](auto i) { stored(x + i * kVector, v[i]); });
}

void transform(float* x, int size) {
  switch (size / kVector) {
    case 1: return transform<1>(x);
    case 2: return transform<2>(x);
    case 4: return transform<4>(x);
    case 8: return transform<8>(x);
    case 16: return transform<16>(x);
  }
  // Longer ones by halves.
  transform(x, size / 2);
  transform(x + size / 2, size / 2);
  for (int i = 0; i < size / 2; i += kVector) {
    const Vec one = loaded<Vec>(x + i), other = loaded<Vec>(x + size / 2 + i);
    stored(x + i, one + other);
    stored(x + size / 2 + i, one - other);
  }
}

typedef uint8_t ByteVec __attribute__((vector_size(kVector)));

inline IntegerVec bytes_at(const uint8_t* from) {
#if defined(__AVX512F__)
  return (IntegerVec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (IntegerVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, IntegerVec);
}

}  // namespace
}  // namespace ingot
