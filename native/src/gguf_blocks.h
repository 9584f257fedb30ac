// Blocks of the K formats of GGUF files, as they lie there: 256 columns of one row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "super.h"

namespace ingot {

// What a block says, taken apart: units as halves, a byte for each quantum, and factors as super.h has them.
struct TakenApart {
  uint8_t unit[2], unit_of_minima[2];
  uint8_t factors[16];
  uint8_t quanta[kSuper];
};

// Bytes of a block with quanta of 2, 3, 4, 5 or 6 bits.
size_t gguf_block_bytes(int bits);

void take_apart(const uint8_t* block, int bits, TakenApart& out);

}  // namespace ingot
