// Vectors in fewer bits, and back: the codecs of kept keys and values (docs/codecs.md). Compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr int kLargestVector = 512;  // numbers of a vector that is rotated

enum class Number { single, half, brain };  // float32, float16 and bfloat16

// A direction, rotated, in a few levels for each coordinate.
struct TurboCode {
  int size, bits;         // a power of two, and at least 16; 1 to 4
  const float* signs;     // [size]
  const float* borders;   // the positive ones, and levels
  const float* levels;    // [1 << bits], rising
  bool keeps_length;      // else the length is what leaves the least error
};

// Even steps from the least number of a group on.
struct AffineCode {
  int size, group, bits;  // 4 or 8
};

// Some vectors, one behind another.
struct Vectors {
  void* numbers;
  Number kind;
  const float* centre;  // [size], which is taken off before and added afterwards; may be null
  const float* other;   // the same for those that are nearer to it, whose first scale has a sign; may be null
  size_t count;
};

struct Codes {
  void (*turbo_encode)(const TurboCode& code, const Vectors& from, uint8_t* codes, uint16_t* lengths);
  void (*turbo_decode)(const TurboCode& code, const uint8_t* codes, const uint16_t* lengths, const Vectors& to);
  // Of each vector the steps of its groups, then the leasts.
  void (*affine_encode)(const AffineCode& code, const Vectors& from, uint8_t* codes, uint16_t* scales);
  void (*affine_decode)(const AffineCode& code, const uint8_t* codes, const uint16_t* scales, const Vectors& to);
};

const Codes& codes();

}  // namespace ingot
