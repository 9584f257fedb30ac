// Matrix products of a few or many rows with weights, packed or plain, on all threads.
#pragma once

#include <vector>

#include "dense.h"
#include "kernels.h"
#include "room.h"
#include "wide.h"

namespace ingot {

// Weights [rows, columns]: plain, in 32 bits or in 16, or packed.
struct Matrix {
  PackedMatrix packed{};
  const float* plain = nullptr;  // takes the place of `packed`
  HalfMatrix half{};             // so does this
  const float* bias = nullptr;   // added to every product; may be missing
  int rows = 0, columns = 0;

  bool is_packed() const { return plain == nullptr && half.values == nullptr; }
  size_t row_bytes() const {
    if (is_packed()) return packed.blocks() * packed.block_bytes();
    return static_cast<size_t>(columns) * (plain != nullptr ? sizeof(float) : sizeof(uint16_t));
  }
};

struct Product {
  const Matrix* w;
  float* y;  // [count, w->rows]
};

// y = x times the transpose of w, for matrices of the same width that share x [count, columns]. A row of x is computed
// the same way whatever the others are, but where there are register tiles maybe in another way with many rows than with few.
void multiply(const std::vector<Product>& products, const float* x, int count);

// The same, with plain weights too: for rows whose number says something about other rows.
void multiply_one_path(const std::vector<Product>& products, const float* x, int count);

// Activations as integers, for weights with groups of one size.
class QuantisedRows {
 public:
  QuantisedRows(int count, int columns, int group);
  // Between what was put before and what is put next.
  void clear();
  // Any thread may put rows.
  void put(int row, const float* x);
  Quantised at(int first) const;  // where a lot begins

  const int count, columns, group;

 private:
  size_t blocks_;
  Room<int8_t> values_;  // and the rests
  Room<float> scales_, sums_, halves_;
  Room<uint8_t> marks_;
};

// y = x times the transpose of w, or added to it, for packed matrices with groups of x's size.
void multiply(const std::vector<Product>& products, const QuantisedRows& x, bool adds = false);

// y = silu(x times the transpose of gate) * (x times that of up), [count, gate.rows].
void multiply_gated(const Matrix& gate, const Matrix& up, const QuantisedRows& x, float* y);

// Activations of many rows as wide products take them.
class Rounded {
 public:
  Rounded(const Wide& use, int count, int columns);
  void clear() {}
  // Any thread may put rows.
  void put(int row, const float* x) { use.round(x, row, rows()); }
  WideRows rows() const { return {values_.data(), count_, columns_}; }

  const Wide& use;

 private:
  int count_, columns_;
  Room<uint16_t> values_;
};

// What multiplies so many rows with packed weights at once; null where one row after another is better, or must be.
const Wide* wide_for(int count);

// y = x times the transpose of w, or added to it.
void multiply(const std::vector<Product>& products, const Rounded& x, bool adds = false);

// y = silu(x times the transpose of gate) * (x times that of up).
void multiply_gated(const Matrix& gate, const Matrix& up, const Rounded& x, Rounded& y);

// Whether a row is computed in the same way however many there are.
bool takes_one_path();

// Whether many rows are computed in register tiles.
bool may_go_wide();

// cblas_sgemm of a BLAS that may be called from several threads at once and uses one thread for each call. Plain
// weights are multiplied by it where there are many rows, and register tiles.
using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
void use_blas(Sgemm sgemm);

// The one that was named; null where none was.
Sgemm named_blas();

// Compute a row the same way however many there are, even where there are register tiles. Elsewhere it always is.
void use_one_path(bool one);

}  // namespace ingot
