// Rounds activations to integers of 8 bits, a block at a time.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "block.h"
#include "fused.h"
#include "isa.h"

namespace ingot {
namespace {  // each instruction set has its own

constexpr float kLargest = 127;
constexpr float kMagic = 0x1.8p23f;  // what is added to it is rounded to an integer in its lowest bits

constexpr int kLanes = std::min(kVector, 8);
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
// Unsigned, as those of what is no number, or too small to be scaled, may add up to more than an integer holds.
typedef uint32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef int8_t ByteLanes __attribute__((vector_size(kLanes)));

inline Lanes lanes(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Lanes sizes(Lanes v) { return v < 0 ? -v : v; }

// Integers that were added to kMagic.
inline IntLanes integers(Lanes shifted) { return std::bit_cast<IntLanes>(shifted) - std::bit_cast<uint32_t>(kMagic); }

// The steps of a block, which lie apart where other rows of a lot come between.
struct Steps {
  int8_t* first;
  size_t stride;

  void put(int step, IntLanes integers) const {
    const ByteLanes bytes = __builtin_convertvector(integers, ByteLanes);
    for (int i = 0; i < kLanes; i += 4) std::memcpy(first + (step + i / 4) * stride, reinterpret_cast<const char*>(&bytes) + i, 4);
  }

  // Four steps, from registers: reading what was written in one piece in parts takes long.
#if defined(__ARM_FEATURE_DOTPROD)
  void put(int step, int8x16_t bytes) const {
    const int32x4_t words = vreinterpretq_s32_s8(bytes);
    int8_t* to = first + step * stride;
    vst1q_lane_s32(reinterpret_cast<int32_t*>(to), words, 0);
    vst1q_lane_s32(reinterpret_cast<int32_t*>(to + stride), words, 1);
    vst1q_lane_s32(reinterpret_cast<int32_t*>(to + 2 * stride), words, 2);
    vst1q_lane_s32(reinterpret_cast<int32_t*>(to + 3 * stride), words, 3);
  }
#elif defined(__AVX512BW__)
  template <int Step>
  void put(__m128i bytes) const {
    int8_t* to = first + Step * stride;
    _mm_storeu_si32(to, bytes);
    _mm_storeu_si32(to + stride, _mm_shuffle_epi32(bytes, 1));
    _mm_storeu_si32(to + 2 * stride, _mm_shuffle_epi32(bytes, 2));
    _mm_storeu_si32(to + 3 * stride, _mm_shuffle_epi32(bytes, 3));
  }
#endif
};

inline int32_t total(IntLanes integers) {
  uint32_t whole = 0;
  for (int l = 0; l < kLanes; l++) whole += integers[l];
  return static_cast<int32_t>(whole);
}

float mean_square(const float* x, int columns) {
  constexpr int kSums = kBlock / kLanes;  // so many that they do not wait for each other
  Lanes sums[kSums] = {};
  for (int i = 0; i < columns; i += kBlock)
#pragma GCC unroll 8
    for (int j = 0; j < kSums; j++) {
      const Lanes v = lanes(x + i + j * kLanes);
      sums[j] = fused(v, v, sums[j]);
    }
  float sum = 0;
  for (int j = 0; j < kSums; j++)
    for (int l = 0; l < kLanes; l++) sum += sums[j][l];
  return sum / static_cast<float>(columns);
}

struct Rounded {
  float scale;
  int32_t halves[2];  // the sums of the integers in each half of the block

  int32_t sum() const { return halves[0] + halves[1]; }
};

constexpr int kHalfBlock = kBlock / 2;

// The largest size in a block; and a block of which that is the largest size, or less, in integers.
#if defined(__AVX512BW__)

float largest_of(const float* x) {
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x)), _mm512_abs_ps(_mm512_loadu_ps(x + 16))));
}

Rounded round_block(const float* x, float largest, Steps values) {
  const __m512 inverse = _mm512_set1_ps(largest > 0 ? kLargest / largest : 0);
  const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
  const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));
  values.put<0>(_mm512_cvtepi32_epi8(first));
  values.put<4>(_mm512_cvtepi32_epi8(second));
  return {largest * (1 / kLargest), {_mm512_reduce_add_epi32(first), _mm512_reduce_add_epi32(second)}};
}

#elif defined(__ARM_FEATURE_DOTPROD)

float largest_of(const float* x) {
  float32x4_t largest = vdupq_n_f32(0);
  for (int i = 0; i < kBlock; i += 4) largest = vmaxnmq_f32(largest, vabsq_f32(vld1q_f32(x + i)));
  return vmaxnmvq_f32(largest);
}

Rounded round_block(const float* x, float largest, Steps values) {
  const float inverse = largest > 0 ? kLargest / largest : 0;
  Rounded rounded{largest * (1 / kLargest), {}};
  for (int i = 0; i < kBlock; i += kHalfBlock) {
    int16x8_t n[4];  // an integer in the first half of each pair
    for (int j = 0; j < 4; j++)
      n[j] = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * j), inverse), vdupq_n_f32(kMagic)));
    const int16x8_t first = vuzp1q_s16(n[0], n[1]), second = vuzp1q_s16(n[2], n[3]);
    const int8x16_t all = vuzp1q_s8(vreinterpretq_s8_s16(first), vreinterpretq_s8_s16(second));
    rounded.halves[i / kHalfBlock] = vaddvq_s32(vdotq_s32(vdupq_n_s32(0), all, vdupq_n_s8(1)));
    values.put(i / 4, all);
  }
  return rounded;
}

#else

float largest_of(const float* x) {
  Lanes largest{};
  for (int i = 0; i < kBlock; i += kLanes) {
    const Lanes size = sizes(lanes(x + i));
    largest = size > largest ? size : largest;
  }
  float most = 0;
  for (int l = 0; l < kLanes; l++) most = std::max(most, largest[l]);
  return most;
}

Rounded round_block(const float* x, float largest, Steps values) {
  const float inverse = largest > 0 ? kLargest / largest : 0;
  IntLanes sums[2] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    const IntLanes rounded = integers(lanes(x + i) * inverse + kMagic);
    values.put(i / 4, rounded);
    sums[i / kHalfBlock] += rounded;
  }
  return {largest * (1 / kLargest), {total(sums[0]), total(sums[1])}};
}

#endif

// With rests in more steps than this, it is the block that is large, not some of it. Also, sums stay small.
constexpr int kMostRests = kSteps / 2;

// A block in which what is above `most` has a rest. Gives the steps in which there are any.
uint8_t round_with_rests(const float* x, float largest, float most, Steps values, Steps rests, Rounded& rounded) {
  Lanes inside{};
  uint8_t marks = 0;
  for (int i = 0; i < kBlock; i += kLanes) {
    const Lanes size = sizes(lanes(x + i)), within = size > most ? Lanes{} : size;
    const auto above = size > most;
    inside = within > inside ? within : inside;
    for (int l = 0; l < kLanes; l++) marks |= (above[l] & 1) << (i + l) / 4;
  }
  if (std::popcount(marks) > kMostRests) {
    rounded = round_block(x, largest, values);
    return 0;
  }
  // What is larger than all others by more than a rest can hold takes bits from them.
  float inner = largest / (kRest + 1);
  for (int l = 0; l < kLanes; l++) inner = std::max(inner, inside[l]);
  const float step = kRest * inner / kLargest, inverse = 1 / step;
  float left[kBlock];
  IntLanes sums[2] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    const Lanes v = lanes(x + i), some = sizes(v) > most ? v * inverse : Lanes{}, bound = Lanes{} + kLargest;
    const Lanes shifted = (some > bound ? bound : some < -bound ? -bound : some) + kMagic;
    const Lanes rest = v - (shifted - kMagic) * step;
    rests.put(i / 4, integers(shifted));
    sums[i / kHalfBlock] += integers(shifted);
    std::memcpy(left + i, &rest, sizeof(rest));
  }
  rounded = round_block(left, inner, values);
  for (int half = 0; half < 2; half++) rounded.halves[half] += kRest * total(sums[half]);
  return marks;
}

}  // namespace
}  // namespace ingot
