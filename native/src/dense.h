// Products with plain weights, of 32 bits or of 16, which are widened on the way; compiled once for each instruction
// set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

// Weights as they lie in files: bfloat16, or float16.
struct HalfMatrix {
  const uint16_t* values = nullptr;
  bool brain = false;  // bfloat16
};

struct Dense {
  // y[m * stride + n] = x[m] . w[n] for n in [first, last) and m in [0, count). A row is summed up in the same order
  // however many there are, and with weights of 16 bits as with the same ones of 32.
  void (*multiply)(const float* w, const float* x, int columns, int count, int first, int last, float* y, size_t stride);
  void (*multiply_half)(const HalfMatrix& w, const float* x, int columns, int count, int first, int last, float* y,
                        size_t stride);
  // The values [first, first + count) of w as float32, exactly.
  void (*widen)(const HalfMatrix& w, size_t first, size_t count, float* out);
};

const Dense& dense();  // of the same instruction set as kernels()

}  // namespace ingot
