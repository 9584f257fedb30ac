// Weights that Python handed over: mlx arrays kept alive, and what the kernels see of them.
#pragma once

#include <optional>
#include <vector>

#include "mlx/mlx.h"
#include "packing.h"
#include "product.h"

namespace ingot {

// A matrix, or one for each of several experts, and the arrays that own its memory. Raises std::invalid_argument for a
// form that the kernels do not know.
class Weights {
 public:
  // quanta, scales and biases as mx.quantize gives them, with 2, 3, 4, 5, 6 or 8 bits and groups of 32, 64 or 128. They
  // are put into another order (see kernels.h), in memory of their own.
  static Weights packed(const mlx::core::array& quanta, const mlx::core::array& scales, const mlx::core::array& biases,
                        const std::optional<mlx::core::array>& bias, int group, int bits);
  // Blocks of a K format of GGUF files with so many bits, as they lie there: uint8 [rows, bytes of a row].
  static Weights blocks(const mlx::core::array& blocks, const std::optional<mlx::core::array>& bias, int bits);
  // As packed, for mode "mxfp4".
  static Weights mxfp4(const mlx::core::array& quanta, const mlx::core::array& scales,
                       const std::optional<mlx::core::array>& bias);
  // bfloat16 and float16 stay what they are; anything else becomes float32. Products are float32's either way.
  static Weights plain(const mlx::core::array& weight, const std::optional<mlx::core::array>& bias);

  const Matrix& matrix() const { return matrices_.front(); }
  const std::vector<Matrix>& matrices() const { return matrices_; }  // one, or one for each expert
  // What is kept alive: the weights, or quanta, scales and biases, or quanta and factors; then the bias, if there is one.
  const std::vector<mlx::core::array>& arrays() const { return owned_; }

 private:
  static Weights arranged(const Arranged& arranged, const std::optional<mlx::core::array>& bias);
  void take_bias(const std::optional<mlx::core::array>& bias);

  std::vector<Matrix> matrices_;
  std::vector<mlx::core::array> owned_;
};

// A vector of floats, evaluated and kept alive.
class Vector {
 public:
  Vector(const mlx::core::array& values, int size);
  const float* data() const { return owned_.data<float>(); }

 private:
  mlx::core::array owned_;
};

// The array's values in a row, of that type, evaluated.
mlx::core::array settled(const mlx::core::array& a, mlx::core::Dtype dtype);

// Throws std::invalid_argument with `what` unless `holds`.
void require(bool holds, const char* what);

}  // namespace ingot
