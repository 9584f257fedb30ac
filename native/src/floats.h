// What a transformer layer does between its matrix products, in float32; compiled once for each instruction set.
#pragma once

#include <cstddef>

#include "half.h"

namespace ingot {

enum class Gate { silu, gelu, gelu_tanh, sigmoid };

// How the queries of a head see its keys.
struct Sight {
  int dim;
  float scale;  // of the scores
  float cap;    // a score s becomes cap * tanh(s / cap); 0: it stays what it is
  int window;   // a query sees as many of the newest keys, its own among them; 0: all of them
  int shift;    // the position of the first key; sums are cut into blocks by positions, so that they come out the same
                // wherever in its buffer a sequence lies and however many queries come together
};

struct Floats {
  // y = weight * x / sqrt(mean(x * x) + eps), over `size` values.
  void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* y);
  // y = weight * (x - mean(x)) / sqrt(variance(x) + eps) + bias; either may be absent.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int size, float* y);
  void (*add)(float* y, const float* x, size_t size);
  // gate = gate * sigmoid(gate) * up.
  void (*swiglu)(float* gate, const float* up, size_t size);
  // y = act(gate) * up; y may be gate.
  void (*gate)(Gate kind, const float* gate, const float* up, size_t size, float* y);
  // Turns the pairs of a head's first `dims` values; a pair is two neighbours, or a value and the one dims / 2 on.
  void (*rotate)(float* head, const float* cosines, const float* sines, int dims, bool neighbours);
  // `queries` tokens in a row, of which the last sees `keys` keys and each one before it one less; `group` heads that
  // share keys and values lie behind one another, tokens `stride` apart, in q and in out. Each head's sink, if there
  // are any, is a score that takes its share of the weights and adds nothing. `scratch`: see attend_scratch.
  void (*attend)(const Sight& how, const float* q, int queries, int group, size_t stride, const float* k, const float* v,
                 int keys, const float* sinks, float* scratch, float* out);
  void (*attend_halves)(const Sight& how, const float* q, int queries, int group, size_t stride, const Half* k,
                        const Half* v, int keys, const float* sinks, float* scratch, float* out);
  // Each number as half_of has it.
  void (*halve)(const float* x, size_t size, Half* y);
};

constexpr int kKeyBlock = 64;  // keys whose scores exist at once

// Values that `attend` needs room for.
static inline size_t attend_scratch(int rows, int dim) {
  const size_t padded = (rows + 7) / 8 * 8;
  return 2 * padded * dim + static_cast<size_t>(32 + kKeyBlock) * dim + padded * kKeyBlock + 3 * padded;
}

const Floats& floats();  // of the same instruction set as kernels()

}  // namespace ingot
