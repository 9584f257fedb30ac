// a * b + c in one step where the instruction set has it. Said explicitly: the compiler, which may not contract on its own
// here, would choose differently in different places, and sums that must be the same to the last bit would not be.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__FMA__)
#include <immintrin.h>
#endif

namespace ingot {
namespace {  // each instruction set has its own

inline float fused(float a, float b, float c) {
#if defined(__aarch64__) || defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Vectors of floats; as in all of the compiler's vectors, one operand may be a single value.
template <class V>
inline V fused(V a, V b, V c) {
#if defined(__aarch64__)
  if constexpr (sizeof(V) == 16) return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__)
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
  if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  if constexpr (sizeof(V) == 16) return (V)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#endif
  return a * b + c;
}

template <class V>
inline V fused(V a, float b, V c) {
  // Taking nothing off, unlike adding it, is known to change no number: no instruction is spent on it.
  return fused(a, b - V{}, c);
}

}  // namespace
}  // namespace ingot
