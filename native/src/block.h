// What products of packed weights are made of, for the instruction set that a file is compiled for. `Sum` and `Ints` hold a
// number for each row of a tile; a `Block` is a tile's weights of a block of columns. Its `products<M, N>` multiplies them with
// the activations of N rows of a lot of M, and `add_rests<M, N>` one step of them with their rests. At most `kMostTogether`
// rows are multiplied at once: more would not fit in registers.
#pragma once

#include <cstring>

#include "half.h"
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

}  // namespace
}  // namespace ingot

#if defined(__ARM_FEATURE_DOTPROD)
#include "block_neon.h"
#elif defined(__AVX512BW__)
#include "block_avx512.h"
#elif defined(__AVX2__)
#include "block_avx2.h"
#else
#include "block_portable.h"
#endif
