// Products of a tile of weights whose factors are in two levels (see super.h).
#pragma once

#include <algorithm>

#include "block.h"
#include "super.h"
#include "tile.h"

namespace ingot {
namespace {  // each instruction set has its own

// Takes the place of a number format of factors.
struct Super {};

// One tile of weights and the M activation rows of a lot, as the other tiles have them.
template <int M, int Bits>
class Tile<M, Bits, Super> {
 public:
  Tile(const PackedMatrix& w, const Quantised& x, int n)
      : x_(x), parts_(w.columns / kSuper), quanta_(w.quanta + static_cast<size_t>(n / kTile) * w.blocks() * kBytes),
        factors_(static_cast<const uint8_t*>(w.scales) + static_cast<size_t>(n) * w.factor_bytes()) {}

  void multiply(Sum* sums) const {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sums[m] = zero();
    const uint8_t *quanta = quanta_, *factors = factors_;
    for (int part = 0, block = 0; part < parts_; part++, factors += kTile * kForm.row_bytes()) {
      const Units units(factors);
      const uint8_t* bytes = factors + kTile * kForm.unit_bytes();
      for (int end = block + kSuper / kBlock; block < end; block++, quanta += kBytes, bytes += 2 * kTile) {
        for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(quanta + kAhead + line);
        if constexpr (kForm.halved)
          add_halves(quanta, static_cast<size_t>(block) * M, units.group(bytes), units.group(bytes + kTile), sums);
        else
          add_whole(quanta, static_cast<size_t>(block) * M, units.group(bytes), sums);
      }
    }
  }

 private:
  static constexpr SuperForm kForm = super_form(Bits);
  static constexpr size_t kBytes = kTile * kBlock * Bits / 8;  // of a block
  static constexpr int kTogether = std::min(M, kMostTogether);

  struct Group {
    Sum scale, bias;
  };

  // Of a tile's rows; they make factors of the bytes of a group.
  struct Units {
    explicit Units(const uint8_t* factors)
        : unit(load(reinterpret_cast<const Half*>(factors))),
          minus(kForm.minima ? plus(zero(), load(reinterpret_cast<const Half*>(factors) + kTile), -1.0f) : zero()) {}

    Group group(const uint8_t* bytes) const {
      if constexpr (!kForm.halved) return {times(unit, numbers(widened(bytes))), times(minus, numbers(widened(bytes + kTile)))};
      if constexpr (kForm.minima) return nibbles(bytes);
      return centred(bytes);
    }

    Group nibbles(const uint8_t* bytes) const {
      const Ints both = widened(bytes);
      return {times(unit, numbers(low_half(both))), times(minus, numbers(high_half(both)))};
    }

    Group centred(const uint8_t* bytes) const {
      const Sum scale = times(unit, numbers(widened(reinterpret_cast<const int8_t*>(bytes))));
      return {scale, plus(zero(), scale, -static_cast<float>(kForm.centre))};
    }

    Sum unit, minus;
  };

  void add_whole(const uint8_t* quanta, size_t at, const Group& group, Sum* sums) const {
    const Block<Bits> weights(quanta);
#pragma GCC unroll 2
    for (int m = 0; m < M; m += kTogether) {
      Ints found[kTogether];
      weights.template products<M, kTogether>(x_.values + at * kBlock + 4 * m, found);
      add_rests<M, kTogether, Bits>(x_, x_.marks[at], quanta, at, m, found);
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; i++) {
        sums[m + i] = plus(sums[m + i], scaled(found[i], group.scale), x_.scales[at + m + i]);
        sums[m + i] = plus(sums[m + i], group.bias, x_.sums[at + m + i]);
      }
    }
  }

  void add_halves(const uint8_t* quanta, size_t at, const Group& first, const Group& second, Sum* sums) const {
    constexpr int kHalf = kSteps / 2;
    constexpr unsigned kMarks = (1u << kHalf) - 1;
    const Block<Bits> weights(quanta);
    const unsigned marks = x_.marks[at];
#pragma GCC unroll 2
    for (int m = 0; m < M; m += kTogether) {
      Ints low[kTogether], high[kTogether];
      const int8_t* values = x_.values + at * kBlock + 4 * m;
      weights.template products<M, kTogether, 0, kHalf>(values, low);
      weights.template products<M, kTogether, kHalf, kSteps>(values, high);
      add_rests<M, kTogether, Bits>(x_, marks & kMarks, quanta, at, m, low);
      add_rests<M, kTogether, Bits>(x_, marks & ~kMarks, quanta, at, m, high);
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; i++) {
        const Sum both = plus(scaled(low[i], first.scale), scaled(high[i], second.scale), 1.0f);
        sums[m + i] = plus(sums[m + i], both, x_.scales[at + m + i]);
        sums[m + i] = plus(sums[m + i], first.bias, x_.halves[2 * at + m + i]);
        sums[m + i] = plus(sums[m + i], second.bias, x_.halves[2 * at + M + m + i]);
      }
    }
  }

  const Quantised& x_;
  int parts_;
  const uint8_t *quanta_, *factors_;
};

}  // namespace
}  // namespace ingot
