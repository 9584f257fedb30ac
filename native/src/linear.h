#pragma once

#include "mlx/mlx.h"

namespace ingot {

// x [..., columns] times the transpose of a packed matrix [rows, columns]: [..., rows], float32.
// quanta, scales and biases are as mx.quantize gives them, with 4 or 8 bits and groups of 32, 64 or 128; scales and
// biases float32. Raises std::invalid_argument for anything else.
mlx::core::array linear(
    const mlx::core::array& x, const mlx::core::array& quanta, const mlx::core::array& scales,
    const mlx::core::array& biases, int group, int bits, mlx::core::StreamOrDevice stream = {});

// cblas_sgemm of a BLAS that may be called from several threads at once and uses one thread for each call.
using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
void use_blas(Sgemm sgemm);

}  // namespace ingot
