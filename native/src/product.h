// Matrix products of a few or many rows with weights, packed or plain, on all threads.
#pragma once

#include <vector>

#include "kernels.h"

namespace ingot {

// Weights [rows, columns]: plain float32, or packed.
struct Matrix {
  PackedMatrix packed{};
  const float* plain = nullptr;  // takes the place of `packed`
  const float* bias = nullptr;   // added to every product; may be missing
  int rows = 0, columns = 0;
};

struct Product {
  const Matrix* w;
  float* y;  // [count, w->rows]
};

// y = x times the transpose of w, for matrices of the same width that share x [count, columns]. A row of x is computed
// the same way whatever the others are, but with many rows maybe in another way than with few.
void multiply(const std::vector<Product>& products, const float* x, int count);

// cblas_sgemm of a BLAS that may be called from several threads at once and uses one thread for each call. Plain
// weights are multiplied by it where there are many rows.
using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
void use_blas(Sgemm sgemm);

// Compute a row the same way however many there are.
void use_one_path(bool one);

}  // namespace ingot
