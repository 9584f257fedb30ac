// Products with plain weights of 16 bits, which are widened on the way; compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

// Weights as they lie in files: bfloat16, or float16.
struct HalfMatrix {
  const uint16_t* values = nullptr;
  bool brain = false;  // bfloat16
};

struct Halves {
  // y[m * stride + n] = x[m] . w[n] for n in [first, last) and m in [0, count). Sums in the order of Floats::multiply.
  void (*multiply)(const HalfMatrix& w, const float* x, int columns, int count, int first, int last, float* y,
                   size_t stride);
  // The values [first, first + count) of w as float32, exactly.
  void (*widen)(const HalfMatrix& w, size_t first, size_t count, float* out);
};

const Halves& halves();  // of the same instruction set as kernels()

}  // namespace ingot
