// What a transformer layer does between its matrix products, in float32; compiled once for each instruction set.
#pragma once

#include <cstddef>

namespace ingot {

struct Floats {
  // y = weight * x / sqrt(mean(x * x) + eps), over `size` values.
  void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* y);
  void (*add)(float* y, const float* x, size_t size);
  // gate = gate * sigmoid(gate) * up.
  void (*swiglu)(float* gate, const float* up, size_t size);
  // Turns the pairs of a head's first `dims` values; a pair is two neighbours, or a value and the one dims / 2 on.
  void (*rotate)(float* head, const float* cosines, const float* sines, int dims, bool neighbours);
  // `queries` tokens in a row, of which the last sees `keys` keys and each one before it one less. Queries and outputs
  // of one head lie `stride` apart; `scratch` holds 4 * keys values.
  void (*attend)(const float* q, int queries, size_t stride, const float* k, const float* v, int keys, int dim,
                 float scale, float* scratch, float* out);
  // y[m * stride + n] = x[m] . w[n] for n in [first, last) and m in [0, count).
  void (*multiply)(const float* w, const float* x, int columns, int count, int first, int last, float* y, size_t stride);
};

const Floats& floats();  // of the same instruction set as kernels()

}  // namespace ingot
