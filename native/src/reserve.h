// Arrays whose memory exists only where it was written.
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace ingot {

// Reads as zeros. It is no part of what mlx counts as memory in use. Raises std::bad_alloc where there are no addresses left
// for it, and std::invalid_argument for shapes that no array has.
mlx::core::array reserve(const mlx::core::Shape& shape, mlx::core::Dtype dtype);

// Waits for the array, and gives back the memory of these rows of its first axis, as far as it is whole pages of memory: they
// read as zeros from now on. Nobody may be about to read them. Raises std::invalid_argument for rows that there are not.
void discard(mlx::core::array& array, const std::vector<int>& rows);

}  // namespace ingot
