#include "gguf_blocks.h"

#include <cstring>

namespace ingot {
namespace {

void copy_half(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, 2); }

// Q2_K: a byte for each 16 columns, two bits of each column, both units. Of 128 columns, 32 bytes have the bits: the first
// 32 columns have the lowest.
void take_2(const uint8_t* block, TakenApart& out) {
  std::memcpy(out.factors, block, 16);
  copy_half(block + 80, out.unit);
  copy_half(block + 82, out.unit_of_minima);
  for (int k = 0; k < kSuper; k++) out.quanta[k] = block[16 + k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
}

// Q3_K: the third bits, of which byte i has those of the columns i, i + 32, ...; two bits as in Q2_K; scales of 6 bits, from
// 32 on, of which 8 bytes have four bits and 4 bytes two; the unit.
void take_3(const uint8_t* block, TakenApart& out) {
  const uint8_t *scales = block + 96;
  copy_half(block + 108, out.unit);
  for (int i = 0; i < 16; i++) {
    const int low = scales[i % 8] >> (i / 8 * 4) & 15, high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
    out.factors[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  for (int k = 0; k < kSuper; k++) {
    const int low = block[32 + k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3, high = block[k % 32] >> (k / 32) & 1;
    out.quanta[k] = static_cast<uint8_t>(low | high << 2);
  }
}

// Of Q4_K and Q5_K: both units, then eight scales and eight minima of 6 bits. Four bytes have the first scales and the upper two
// bits of the others, four the same of minima, and four the lower bits of the other scales and minima.
void take_factors(const uint8_t* block, TakenApart& out) {
  copy_half(block, out.unit);
  copy_half(block + 2, out.unit_of_minima);
  const uint8_t* p = block + 4;
  for (int i = 0; i < 4; i++) {
    out.factors[2 * i] = p[i] & 63;
    out.factors[2 * i + 1] = p[4 + i] & 63;
    out.factors[8 + 2 * i] = static_cast<uint8_t>((p[8 + i] & 15) | p[i] >> 6 << 4);
    out.factors[8 + 2 * i + 1] = static_cast<uint8_t>(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
  }
}

// Four bits of each column: of 64 of them, 32 bytes have those of the first 32 in their low halves.
int half_byte(const uint8_t* p, int k) { return p[k / 64 * 32 + k % 32] >> (k % 64 / 32 * 4) & 15; }

void take_4(const uint8_t* block, TakenApart& out) {
  take_factors(block, out);
  for (int k = 0; k < kSuper; k++) out.quanta[k] = static_cast<uint8_t>(half_byte(block + 16, k));
}

// Q5_K has the fifth bits before the others: byte i has those of the columns i, i + 32, ...
void take_5(const uint8_t* block, TakenApart& out) {
  take_factors(block, out);
  for (int k = 0; k < kSuper; k++)
    out.quanta[k] = static_cast<uint8_t>(half_byte(block + 48, k) | (block[16 + k % 32] >> (k / 32) & 1) << 4);
}

// Q6_K: four bits of each column, of which 64 bytes have those of 128 columns; the other two, as in Q2_K; a scale for each 16
// columns; the unit.
void take_6(const uint8_t* block, TakenApart& out) {
  std::memcpy(out.factors, block + 192, 16);
  copy_half(block + 208, out.unit);
  for (int k = 0; k < kSuper; k++) {
    const int low = block[k / 128 * 64 + k % 64] >> (k % 128 / 64 * 4) & 15;
    const int high = block[128 + k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
    out.quanta[k] = static_cast<uint8_t>(low | high << 4);
  }
}

}  // namespace

size_t gguf_block_bytes(int bits) {
  switch (bits) {
    case 2: return 84;
    case 3: return 110;
    case 4: return 144;
    case 5: return 176;
    default: return 210;
  }
}

void take_apart(const uint8_t* block, int bits, TakenApart& out) {
  switch (bits) {
    case 2: return take_2(block, out);
    case 3: return take_3(block, out);
    case 4: return take_4(block, out);
    case 5: return take_5(block, out);
    default: return take_6(block, out);
  }
}

size_t small_block_bytes(int bits, bool minima) { return (minima ? 4 : 2) + (bits == 5 ? 4 : 0) + (bits == 8 ? 32 : 16); }

void take_small(const uint8_t* block, int bits, bool minima, uint8_t* quanta) {
  const uint8_t* p = block + (minima ? 4 : 2);
  if (bits == 8) {  // signed: with the first bit turned, they begin at nought
    for (int k = 0; k < 32; k++) quanta[k] = p[k] ^ 128;
    return;
  }
  // Bit k of four bytes is the fifth bit of column k. The lower halves of sixteen bytes have the first columns.
  const uint8_t* fifth = p;
  if (bits == 5) p += 4;
  for (int k = 0; k < 32; k++) {
    quanta[k] = p[k % 16] >> (k / 16 * 4) & 15;
    if (bits == 5) quanta[k] |= (fifth[k / 8] >> (k % 8) & 1) << 4;
  }
}

}  // namespace ingot
