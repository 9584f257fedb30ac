// How the quanta of a block lie in a tile: in planes of 8, 4, 2 or 1 bits of each. With 3 bits there is a plane of 2 and one of
// 1, with 5 one of 4 and one of 1, with 6 one of 4 and one of 2; the lower bits come first. In a plane, a byte has that part
// of as many steps as fit in it: of the first in its lowest bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

constexpr int low_plane(int bits) { return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits; }

struct Place {
  size_t byte;
  int shift;
};

// Where a plane of `width` bits has its part of a column: the `t`th of a step of the `row`th row of a tile.
inline Place place(int width, int tile, int row, int step, int t) {
  const int steps = 8 / width;
  return {static_cast<size_t>(step / steps * tile + row) * 4 + t, step % steps * width};
}

// Bytes of the plane of so many bits of a block, and with them where the next plane begins.
constexpr size_t plane_bytes(int width, int tile) { return static_cast<size_t>(tile) * 4 * width; }

inline int quantum(const uint8_t* block, int bits, int tile, int row, int step, int t) {
  const int low = low_plane(bits);
  const Place at = place(low, tile, row, step, t);
  const int lower = block[at.byte] >> at.shift & ((1 << low) - 1);
  if (low == bits) return lower;
  const Place above = place(bits - low, tile, row, step, t);
  return lower | (block[plane_bytes(low, tile) + above.byte] >> above.shift & ((1 << (bits - low)) - 1)) << low;
}

// Puts the quanta of a row, of all steps, into a block that has been nought there.
template <int Bits>
inline void put_quanta(uint8_t* block, int tile, int row, const uint8_t* quanta) {
  constexpr int kLow = low_plane(Bits), kHigh = Bits - kLow;
  uint8_t* above = block + plane_bytes(kLow, tile);
  for (int step = 0; step < 8; step++, quanta += 4) {
    const Place low = place(kLow, tile, row, step, 0);
    for (int t = 0; t < 4; t++) block[low.byte + t] |= static_cast<uint8_t>((quanta[t] & ((1 << kLow) - 1)) << low.shift);
    if constexpr (kHigh != 0) {
      const Place high = place(kHigh, tile, row, step, 0);
      for (int t = 0; t < 4; t++) above[high.byte + t] |= static_cast<uint8_t>(quanta[t] >> kLow << high.shift);
    }
  }
}

// The same for all rows of a tile at once, one step in each vector. An instruction set has three functions for it:
// bytes_at(p, n) is the nth vector from p on; field<Shift, Mask>(v) has each byte shifted by so many bits to the right, or
// else to the left, and of it what the mask leaves; joined(a, b) has the bits of both.
template <int Bits, int Step, class Vectors>
inline auto step_quanta(const uint8_t* block) {
  constexpr int kLow = low_plane(Bits), kHigh = Bits - kLow;
  if constexpr (Bits == 8) {
    return Vectors::bytes_at(block, Step);
  } else if constexpr (kHigh == 0) {
    constexpr int kSteps = 8 / Bits;
    return Vectors::template field<Step % kSteps * Bits, (1 << Bits) - 1>(Vectors::bytes_at(block, Step / kSteps));
  } else {
    constexpr int kSteps = 8 / kHigh;
    const auto high = Vectors::bytes_at(block, kLow + Step / kSteps);
    return Vectors::joined(step_quanta<kLow, Step, Vectors>(block),
                           Vectors::template field<Step % kSteps * kHigh - kLow, ((1 << kHigh) - 1) << kLow>(high));
  }
}

// All steps of a block.
template <int Bits, class Vectors, class Bytes>
inline void read_quanta(const uint8_t* block, Bytes* w) {
  w[0] = step_quanta<Bits, 0, Vectors>(block);
  w[1] = step_quanta<Bits, 1, Vectors>(block);
  w[2] = step_quanta<Bits, 2, Vectors>(block);
  w[3] = step_quanta<Bits, 3, Vectors>(block);
  w[4] = step_quanta<Bits, 4, Vectors>(block);
  w[5] = step_quanta<Bits, 5, Vectors>(block);
  w[6] = step_quanta<Bits, 6, Vectors>(block);
  w[7] = step_quanta<Bits, 7, Vectors>(block);
}

// One of them.
template <int Bits, class Vectors>
inline auto read_step(const uint8_t* block, int step) {
  if constexpr (Bits == 8) return Vectors::bytes_at(block, step);
  switch (step) {
    case 0: return step_quanta<Bits, 0, Vectors>(block);
    case 1: return step_quanta<Bits, 1, Vectors>(block);
    case 2: return step_quanta<Bits, 2, Vectors>(block);
    case 3: return step_quanta<Bits, 3, Vectors>(block);
    case 4: return step_quanta<Bits, 4, Vectors>(block);
    case 5: return step_quanta<Bits, 5, Vectors>(block);
    case 6: return step_quanta<Bits, 6, Vectors>(block);
    default: return step_quanta<Bits, 7, Vectors>(block);
  }
}

}  // namespace ingot
