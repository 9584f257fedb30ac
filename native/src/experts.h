// Layers of experts: each token is multiplied with the weights of those that a router chose for it.
#pragma once

#include <memory>

#include "mlx/mlx.h"
#include "weights.h"

namespace ingot {

// x [..., columns] and indices [..., k] of experts: [..., k, rows], float32. What a token gives does not depend on the
// others. An index that names no expert gives zeros.
// Raises std::invalid_argument for shapes that do not fit.
mlx::core::array gather(const mlx::core::array& x, const mlx::core::array& indices, std::shared_ptr<const Weights> weights,
                        mlx::core::StreamOrDevice stream = {});

// What lies between an expert's first products and its last: gate * sigmoid(slope * gate) * (up + offset), with gate cut
// off above `limit`, up on both sides. Without a limit it is infinite.
struct Gating {
  float slope, limit, offset;
};

// An expert's whole MLP: down(gating(gate(x), up(x))).
struct GatedExperts {
  std::shared_ptr<const Weights> gate, up, down;
  Gating gating;
};

// As `gather`, for such experts: [..., k, rows of down].
mlx::core::array gather_gated(const mlx::core::array& x, const mlx::core::array& indices, GatedExperts experts,
                              mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
