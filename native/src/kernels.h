// What is compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

// Activations are cut into blocks of this many, each with a scale of its own.
constexpr int kBlock = 32;

// A weight matrix as MLX packs it: rows x columns values of 4 or 8 bits, in groups along a row with a scale and a bias:
// value = scale * quantum + bias.
struct PackedMatrix {
  const uint8_t* quanta;
  const float* scales;
  const float* biases;
  int rows, columns, group, bits;

  size_t row_bytes() const { return static_cast<size_t>(columns) * bits / 8; }
  int groups() const { return columns / group; }
  int blocks() const { return columns / kBlock; }
};

// Activations as integers of 16 bits in two halves, value = scale * (256 * high + low), which products of 8 bits can
// take. Within a block the even ones come before the odd ones when the weights have 4 bits, as those are unpacked so.
struct Quantised {
  int8_t* high;
  int8_t* low;
  float* scales;  // one a block
  float* sums;    // of the activations that meet one group of weights
};

struct Kernels {
  const char* name;
  void (*quantise)(const float* x, int columns, int group, bool split_pairs, Quantised out);
  // y[m * stride + n] for n in [first, last) and all m in [0, count); x holds `count` quantised rows one after another.
  void (*multiply)(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride);
  // Rows [first, last) as plain numbers, one row after another.
  void (*unpack)(const PackedMatrix& w, int first, int last, float* out);
};

const Kernels& kernels();  // the fastest set that this machine can run

}  // namespace ingot
