// What is compiled once for each instruction set: products of packed weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "super.h"

namespace ingot {

// Activations are cut into blocks of this many, each with a scale of its own.
constexpr int kBlock = 32;

// A weight matrix [rows, columns]: value = scale * quantum + bias, with a scale and a bias for each group along a row.
//
// Rows lie together in tiles of as many as a vector of the instruction set holds; the last tile may be filled up. For
// each block of columns a tile has, four columns at a time, those columns of one row after another, so that one
// instruction multiplies four activations with four weights of each row; how their bits lie is in planes.h. Scales and
// biases of a group lie together too, in 16 bits where those hold all of them exactly, or else in two levels (see super.h).
enum class Factors { floats, halves, super };

struct PackedMatrix {
  const uint8_t* quanta;
  const void* scales;  // in two levels, these are all factors
  const void* biases;
  int rows, columns, group, bits;  // 2, 3, 4, 5, 6 or 8 bits
  Factors factors;

  size_t block_bytes() const { return static_cast<size_t>(kBlock) * bits / 8; }  // of one row
  int groups() const { return columns / group; }
  int blocks() const { return columns / kBlock; }

  // Rows [first, last), where first is where a tile begins.
  PackedMatrix part(int first, int last) const {
    const size_t before = static_cast<size_t>(first) * factor_bytes();
    return {quanta + static_cast<size_t>(first) * blocks() * block_bytes(), static_cast<const char*>(scales) + before,
            static_cast<const char*>(biases) + before, last - first, columns, group, bits, factors};
  }

  // Of the scales of one row, or of all its factors.
  size_t factor_bytes() const {
    if (factors == Factors::super) return columns / kSuper * super_form(bits).row_bytes();
    return static_cast<size_t>(groups()) * (factors == Factors::halves ? 2 : 4);
  }
};

// Activations as integers of 8 bits, value = scale * (integer + kRest * rest). One that is far larger than the others of its
// block would leave them few bits: it has a rest, for which there are 8 bits more, and most others have none. Rows that are
// multiplied together are a lot: for each block of columns, and in it for four columns at a time, a step, a lot has those
// of one row after another. Lots are of 8, 4, 2 or 1 rows; one row less is not worth two lots, so that of the last one some may
// be missing.
struct Quantised {
  int8_t *values, *rests;
  float* scales;   // one a block
  float* sums;     // of the rounded activations that meet one group of weights
  float* halves;   // the same for each half of a block
  uint8_t* marks;  // one a block of a lot, at its first row: the steps in which a row has a rest, a bit each
};

constexpr int kRestBits = 3, kRest = 1 << kRestBits;
constexpr int kLot = 8;

struct Lot {
  int first, size;
};

// The lot that a row is in.
static inline Lot lot_of(int row, int count) {
  const int first = row / kLot * kLot, left = count - first;
  if (left > 5) return {first, kLot};
  if (left > 2 && row < first + 4) return {first, 4};
  return left == 5 ? Lot{first + 4, 1} : Lot{first, left};
}

// Rows that there must be room for, with those that fill up the last lot.
static inline int rows_of_lots(int count) {
  const Lot last = lot_of(count - 1, count);
  return count == 0 ? 0 : last.first + last.size;
}

struct Kernels {
  const char* name;
  int tile;  // rows of weights that lie together
  // Whether bytes are signed, as some instructions want them: quanta of 8 bits are then stored with 128 taken off, and
  // the products make up for it.
  bool signed_bytes;
  // One row, which is the `place`th of a lot of that size; `out` is where the lot begins. Marks and rests must have been
  // cleared.
  void (*quantise)(const float* x, int columns, int group, int lot, int place, Quantised out);
  // y[m * stride + n] for n in [first, last) and all m in [0, count); `first` is where a tile begins. x holds `count`
  // quantised rows, one lot after another. Of what is missing in the last lot, nothing is kept.
  void (*multiply)(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride);
  // Rows [first, last) as plain numbers, one row after another.
  void (*unpack)(const PackedMatrix& w, int first, int last, float* out);
};

const Kernels& kernels();  // the fastest set that this machine can run

}  // namespace ingot
