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
  int shift;    // the position of the first key, or what is left of it after whole stretches; sums are cut by positions, so
                // that they come out the same wherever in its buffer a sequence lies and however many queries come together
};

// What rows (queries times heads) have found in some keys: weights and values are as if the largest score were 0.
struct Found {
  int rows, dim;
  float* sums;     // of weights times values, [rows, dim]
  float* largest;  // scores
  float* total;    // of the weights

  Found(int rows, int dim, float* room)
      : rows(rows), dim(dim), sums(room), largest(room + static_cast<size_t>(rows) * dim), total(largest + rows) {}
  static size_t size(int rows, int dim) { return static_cast<size_t>(rows) * (dim + 2); }
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
  // What `queries` tokens in a row find in one stretch of keys; the last of them sees `keys` keys and each one before it one
  // less. `group` heads that share keys and values lie behind one another, tokens `stride` apart, in q; where q is null,
  // they are those of the call before with the same `scratch`, for which see attend_scratch.
  void (*attend)(const Sight& how, const float* q, int queries, int group, size_t stride, const float* k, const float* v,
                 int keys, int stretch, float* scratch, Found found);
  void (*attend_halves)(const Sight& how, const float* q, int queries, int group, size_t stride, const Half* k,
                        const Half* v, int keys, int stretch, float* scratch, Found found);
  // Adds what was found in one stretch to what was found in those before it.
  void (*merge)(Found all, Found more);
  // Each number as half_of has it.
  void (*halve)(const float* x, size_t size, Half* y);
};

constexpr int kKeyBlock = 64;  // keys whose scores exist at once
constexpr int kStretch = 512;  // keys of a stretch: few enough that one long sequence keeps many threads busy

// The stretches that queries see.
struct Stretches {
  int first, last;

  Stretches(const Sight& how, int queries, int keys)
      : first((oldest(how, queries, keys) + how.shift) / kStretch), last((keys - 1 + how.shift) / kStretch) {}
  static int oldest(const Sight& how, int queries, int keys) {  // key that any of them sees
    return how.window > 0 && keys - queries + 1 > how.window ? keys - queries + 1 - how.window : 0;
  }
};

// Values that `attend` needs room for.
static inline size_t attend_scratch(int rows, int dim) {
  const size_t padded = (rows + 7) / 8 * 8;
  return padded * dim + static_cast<size_t>(32 + kKeyBlock) * dim + padded * kKeyBlock + padded;
}

const Floats& floats();  // of the same instruction set as kernels()

}  // namespace ingot
