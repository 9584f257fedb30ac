// What is compiled once for each instruction set: products of packed weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

// Activations are cut into blocks of this many, each with a scale of its own.
constexpr int kBlock = 32;

// A weight matrix [rows, columns]: value = scale * quantum + bias, with a scale and a bias for each group along a row.
//
// Rows lie together in tiles of as many as a vector of the instruction set holds; the last tile may be filled up. For
// each block of columns a tile has, four columns at a time, those columns of one row after another, so that one
// instruction multiplies four activations with four weights of each row. With 4 bits, a byte's low half belongs to
// the first four of eight columns and its high half to the others. Scales and biases of a group lie together too.
struct PackedMatrix {
  const uint8_t* quanta;
  const float* scales;
  const float* biases;
  int rows, columns, group, bits;  // 4 or 8 bits

  size_t block_bytes() const { return static_cast<size_t>(kBlock) * bits / 8; }  // of one row
  int groups() const { return columns / group; }
  int blocks() const { return columns / kBlock; }
};

// Activations as integers of 16 bits in two halves, value = scale * (256 * high + low), which products of 8 bits can
// take.
struct Quantised {
  int8_t* high;
  int8_t* low;
  float* scales;  // one a block
  float* sums;    // of the activations that meet one group of weights
};

struct Kernels {
  const char* name;
  int tile;  // rows of weights that lie together
  // Whether bytes are signed, as some instructions want them: 128 is then taken off quanta that need all 8 bits, and
  // the biases make up for it.
  bool signed_bytes;
  void (*quantise)(const float* x, int columns, int group, Quantised out);
  // y[m * stride + n] for n in [first, last) and all m in [0, count); `first` is where a tile begins. x holds `count`
  // quantised rows one after another.
  void (*multiply)(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride);
  // Rows [first, last) as plain numbers, one row after another.
  void (*unpack)(const PackedMatrix& w, int first, int last, float* out);
};

const Kernels& kernels();  // the fastest set that this machine can run

}  // namespace ingot
