// What products of packed weights are made of, for the instruction set that a file is compiled for. `Sum` and `Ints` hold a
// number for each row of a tile; a `Block` is a tile's weights of a block of columns. Its `products<M, N>` multiplies them with
// the activations of N rows of a lot of M, and `add_rests<M, N>` one step of them with their rests. At most `kMostTogether`
// rows are multiplied at once: more would not fit in registers.
#pragma once

#include <bit>
#include <cstring>

#include "kernels.h"

namespace ingot {
namespace {  // each instruction set has its own

constexpr int kSteps = kBlock / 4;  // a block is multiplied four columns at a time

// A step of one row.
inline int32_t step_of(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof(four));
  return four;
}

// A number of 16 bits: a sign, 5 bits of exponent, 10 of fraction.
struct Half {
  uint16_t bits;
};

inline float value(float number) { return number; }

inline float value(Half half) {
  // Moved to where a float has them, exponent and fraction lack only the difference of the two biases, which a product
  // supplies, also to the smallest numbers.
  const uint32_t magnitude = static_cast<uint32_t>(half.bits & 0x7fff) << 13, sign = static_cast<uint32_t>(half.bits & 0x8000) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f) | sign);
}

}  // namespace
}  // namespace ingot

#if defined(__ARM_FEATURE_DOTPROD)
#include "block_neon.h"
#elif defined(__AVX512VNNI__)
#include "block_avx512.h"
#elif defined(__AVX2__)
#include "block_avx2.h"
#else
#include "block_portable.h"
#endif
