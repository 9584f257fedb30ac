// Products and attention of many rows at once, in bfloat16, for machines with instructions for that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "floats.h"
#include "kernels.h"

namespace ingot {

// Activations [count, columns] as bfloat16, in tiles of kWideTile rows and kBlock columns; the tiles of the same rows lie
// behind one another, and the last rows are filled up to whole tiles.
struct WideRows {
  uint16_t* values;
  int count, columns;
};

constexpr int kWideTile = 16;

static inline size_t wide_size(int count, int columns) {
  return static_cast<size_t>(count + kWideTile - 1) / kWideTile * kWideTile * columns;
}

// Rows [first, last) of a matrix whose products are wanted. `first` is where a tile begins.
struct WidePart {
  const PackedMatrix& w;
  const float* bias;  // may be null
  int first, last;
};

constexpr int kWideMost = 128;  // rows of weights in a part, or of two parts together

struct Wide {
  const char* name;
  void (*round)(const float* x, int row, WideRows out);
  // y[m * stride + n] for n in [first, last), or what is added to it. `scratch` holds the part's numbers, filled up to
  // whole tiles.
  void (*multiply)(const WidePart& part, WideRows x, uint16_t* scratch, bool adds, float* y, size_t stride);
  // y = silu(gate) * up, for parts of the same rows; `scratch` holds the numbers of both.
  void (*multiply_gated)(const WidePart& gate, const WidePart& up, WideRows x, uint16_t* scratch, WideRows y);
  // As Floats::attend and attend_halves.
  void (*attend)(const Sight& how, const float* q, int queries, int group, size_t stride, const Paged<float>& paged, int keys,
                 const float* sinks, float* out);
  void (*attend_halves)(const Sight& how, const float* q, int queries, int group, size_t stride, const Paged<Half>& paged,
                        int keys, const float* sinks, float* out);
};

const Wide* wide();  // null where this machine has nothing of the kind

}  // namespace ingot
