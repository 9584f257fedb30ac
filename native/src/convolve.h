// Filters over time, as a vocoder has them: each step follows from its neighbours, in all of their channels.
#pragma once

#include "mlx/mlx.h"

namespace ingot {

// Rows [count, outputs], as float32: row r is bias + the sum over taps t of x[r + t * dilation - front] times weight[t],
// where rows that x [rows, inputs] does not have are zeros. weight is [taps, inputs, outputs]. What a row comes to does not
// depend on how many there are, but for the order of sums. Raises std::invalid_argument where shapes do not fit together, or
// where no BLAS was named.
mlx::core::array convolve(const mlx::core::array& x, const mlx::core::array& weight, const mlx::core::array& bias,
                          int dilation, int front, int count, mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
