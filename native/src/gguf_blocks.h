// Blocks of GGUF files, as they lie there: 256 columns of one row in the K formats, 32 in the others.
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

// Blocks of 32 columns with a scale, and with a minimum or without: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.
size_t small_block_bytes(int bits, bool minima);

// The 32 quanta of one, from nought on; the scale is the block's first half, the minimum its second.
void take_small(const uint8_t* block, int bits, bool minima, uint8_t* quanta);

}  // namespace ingot
