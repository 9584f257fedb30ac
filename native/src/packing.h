// Packed weights in the order that the kernels of this machine want them.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace ingot {

// What mx.quantize gives, arranged: the same values, in tiles (see kernels.h). Where there is a matrix for each of
// several experts, each begins with a tile of its own.
struct Arranged {
  mlx::core::array quanta;  // uint32; the last tile filled up
  // [rows of whole tiles, groups], float16 where that is exact, else float32. Factors in two levels are all in the scales, as
  // uint8.
  mlx::core::array scales;
  std::optional<mlx::core::array> biases;
  int experts, rows, columns, group;
  int bits;  // 8 for mxfp4, whose numbers become bytes
};

// Weights [rows, columns] or [experts, rows, columns] of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128. Evaluates
// them. Raises std::invalid_argument for anything else.
Arranged arrange(const mlx::core::array& quanta, const mlx::core::array& scales, const mlx::core::array& biases,
                 int group, int bits);

// Blocks of a K format of GGUF files, as they lie there: uint8 [rows, bytes of a row] or [experts, rows, bytes of a row], with
// quanta of 2, 3, 4, 5 or 6 bits.
Arranged arrange_blocks(const mlx::core::array& blocks, int bits);

// The same for mode "mxfp4": numbers of 4 bits with a power of two for each 32 of them.
Arranged arrange_mxfp4(const mlx::core::array& quanta, const mlx::core::array& scales);

}  // namespace ingot
