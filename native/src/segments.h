// Attention of rows to all others of their segment, in both directions: a picture's patches to each other.
#pragma once

#include "mlx/mlx.h"

namespace ingot {

// What queries [segments, rows, heads, size] find in the keys and values [segments, keys, heads, size] of their own
// segment, as float32. Scores of a few queries at a time exist. Raises std::invalid_argument where shapes do not fit
// together, or where no BLAS was named.
mlx::core::array attend_segments(const mlx::core::array& queries, const mlx::core::array& keys,
                                 const mlx::core::array& values, float scale, mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
