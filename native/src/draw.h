// The vocabulary's end of a step: from logits to tokens.
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace ingot {

// How a row's token is drawn. Of the likeliest `top_k` (0: all) those stay that together hold `top_p` of their weight,
// and that are at least `min_p` times as likely as the first. `at` in [0, 1) says which of them; those that are equally
// likely stay or go together. A temperature of 0 takes the likeliest.
struct Draw {
  float temperature, top_p, min_p, at;
  int top_k;
};

// The token of each row of logits [rows, vocab]: [rows], uint32. A row depends on nothing but itself.
// Raises std::invalid_argument where draws and rows differ in number.
mlx::core::array draw(const mlx::core::array& logits, std::vector<Draw> draws, mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
