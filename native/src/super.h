// Weights with factors in two levels, as the K formats of GGUF files have them: so many columns of a row share a unit, of which
// the scale of each group of them is a multiple by a whole number of 8 bits. Where there are minima, so are they, of a unit
// of their own: value = scale * quantum - minimum. Elsewhere value = scale * (quantum - centre).
//
// For each such part of the columns a tile has the units of its rows, in 16 bits; their units of minima, if there are any; and
// 16 times a byte for each of its rows: the scale and the minimum of one block after another, or, where a group is half a
// block, the scale of one group after another. With 2 bits that byte has the scale in its low half, the minimum in its high one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace ingot {

constexpr int kSuper = 256;

struct SuperForm {
  bool halved;  // a group is half a block, not a whole one
  bool minima;
  int centre;

  constexpr size_t unit_bytes() const { return sizeof(Half) * (minima ? 2 : 1); }
  constexpr size_t row_bytes() const { return unit_bytes() + 16; }
};

// The width of quanta tells the formats apart.
constexpr SuperForm super_form(int bits) {
  switch (bits) {
    case 2: return {true, true, 0};
    case 3: return {true, false, 4};
    case 6: return {true, false, 32};
    default: return {false, true, 0};  // 4 and 5
  }
}

// The factors of one row of a tile, from which kSuper columns begin.
template <class Byte>
class SuperRow {
 public:
  SuperRow(int bits, int tile, int row, Byte* part) : form_(super_form(bits)), tile_(tile), row_(row), part_(part) {}

  Byte* unit() const { return part_ + sizeof(Half) * row_; }
  Byte* unit_of_minima() const { return unit() + sizeof(Half) * tile_; }
  Byte* factor(int which) const { return part_ + form_.unit_bytes() * tile_ + which * tile_ + row_; }

  float scale(int column) const {
    if (!form_.halved) return number(unit()) * *factor(column / 32 * 2);
    const uint8_t byte = *factor(column / 16);
    return number(unit()) * static_cast<float>(form_.minima ? byte & 15 : static_cast<int8_t>(byte));
  }

  float minimum(int column) const {
    if (!form_.minima) return 0;
    return number(unit_of_minima()) * static_cast<float>(form_.halved ? *factor(column / 16) >> 4 : *factor(column / 32 * 2 + 1));
  }

 private:
  static float number(const Byte* p) {
    Half half;
    std::memcpy(&half, p, sizeof(half));
    return value(half);
  }

  SuperForm form_;
  int tile_, row_;
  Byte* part_;
};

}  // namespace ingot
