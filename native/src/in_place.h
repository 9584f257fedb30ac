// What operations that write to their states in place have in common.
#pragma once

#include <stdexcept>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"

namespace ingot {

// Makes the outputs let go of the inputs. Every output holds all of them until it is evaluated, and what many hold is
// nobody's to overwrite.
inline void let_go(const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) {
  for (mlx::core::array& output : outputs)
    if (&output.inputs() != &inputs) output.inputs().clear();
}

// Makes them known to the encoder. Raises std::runtime_error unless all are in one piece.
inline void take_whole(mlx::core::cpu::CommandEncoder& encoder, const std::vector<mlx::core::array>& inputs) {
  for (const mlx::core::array& input : inputs) {
    if (!input.flags().row_contiguous) throw std::runtime_error("ingot_native: an input is not contiguous");
    encoder.set_input_array(input);
  }
}

}  // namespace ingot
