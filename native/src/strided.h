#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace ingot {

// The values of an array with any strides, row after row.
std::vector<float> gathered(const float* from, const mlx::core::Shape& shape, const mlx::core::Strides& strides);

}  // namespace ingot
