// Operations that treat rows one by one: norms, the gates of MLPs, and the curve of vocoders.
#pragma once

#include <optional>

#include "floats.h"
#include "mlx/mlx.h"

namespace ingot {

// weight * x / sqrt(mean(x * x) + eps) over the last axis.
mlx::core::array rms_norm(const mlx::core::array& x, const mlx::core::array& weight, float eps,
                          mlx::core::StreamOrDevice stream = {});

// weight * (x - mean(x)) / sqrt(variance(x) + eps) + bias over the last axis.
mlx::core::array layer_norm(const mlx::core::array& x, const std::optional<mlx::core::array>& weight,
                            const std::optional<mlx::core::array>& bias, float eps, mlx::core::StreamOrDevice stream = {});

// act(gate) * up. Without `up` it is the second half of the gate's last axis.
mlx::core::array gated(Gate kind, const mlx::core::array& gate, const std::optional<mlx::core::array>& up,
                       mlx::core::StreamOrDevice stream = {});

// v + sin(alpha * v)^2 / alpha for v = x * scale + shift; each of those has a value for each of the last axis.
mlx::core::array snake(const mlx::core::array& x, const mlx::core::array& scale, const mlx::core::array& shift,
                       const mlx::core::array& alpha, mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
