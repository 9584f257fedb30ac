#pragma once

#include <memory>

#include "mlx/mlx.h"
#include "weights.h"

namespace ingot {

// x [..., columns] times the transpose of weights [rows, columns], with their bias: [..., rows], float32.
// Raises std::invalid_argument for an x of another width.
mlx::core::array linear(const mlx::core::array& x, std::shared_ptr<const Weights> weights,
                        mlx::core::StreamOrDevice stream = {});

// The rows of packed weights that `ids` name, as plain numbers: [..., columns], float32. An id that is not there
// gives zeros.
mlx::core::array lookup(const mlx::core::array& ids, std::shared_ptr<const Weights> weights,
                        mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
