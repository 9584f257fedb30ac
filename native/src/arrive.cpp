#include "arrive.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "half.h"
#include "kernels.h"

namespace ingot {
namespace {

// Four words of four bytes, which compilers turn into one register of whatever the machine has.
typedef uint32_t Words __attribute__((vector_size(16), aligned(4), may_alias));

inline Words load(const uint8_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// Of eight numbers in a word, the first four go into the lower halves of its bytes and the others into the upper ones.
template <class W>
inline W nibbles_by_step(W w) {
  W moved = (w ^ w >> 8) & 0x0000ff00u;
  w ^= moved ^ moved << 8;
  moved = (w ^ w >> 4) & 0x00f000f0u;
  return w ^ moved ^ moved << 4;
}

struct Nibbles {
  template <class W>
  static W of(W w) { return nibbles_by_step(w); }
};

struct Same {
  template <class W>
  static W of(W w) { return w; }
};

struct Flipped {
  template <class W>
  static W of(W w) { return w ^ 0x80808080u; }
};

// Words [rows, width] to [width, tile], where what fills up the tile is nought.
template <class Change>
void transpose_words(const uint8_t* from, int rows, int width, int tile, uint8_t* to) {
  const size_t row_bytes = static_cast<size_t>(width) * 4;
  auto one = [&](int row, int w) {
    uint32_t word;
    std::memcpy(&word, from + row * row_bytes + w * 4, 4);
    word = Change::of(word);
    std::memcpy(to + (static_cast<size_t>(w) * tile + row) * 4, &word, 4);
  };
  const int fours = rows / 4 * 4, whole = width / 4 * 4;
  for (int w = 0; w < whole; w += 4)
    for (int row = 0; row < fours; row += 4) {
      const uint8_t* at = from + row * row_bytes + w * 4;
      const Words a = Change::of(load(at)), b = Change::of(load(at + row_bytes)), c = Change::of(load(at + 2 * row_bytes)),
                  d = Change::of(load(at + 3 * row_bytes));
      const Words ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5),
                  AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const Words out[] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                           __builtin_shufflevector(AB, CD, 0, 1, 4, 5), __builtin_shufflevector(AB, CD, 2, 3, 6, 7)};
      for (int i = 0; i < 4; i++) std::memcpy(to + (static_cast<size_t>(w + i) * tile + row) * 4, &out[i], sizeof out[i]);
    }
  for (int row = 0; row < rows; row++)
    for (int w = row < fours ? whole : 0; w < width; w++) one(row, w);
  if (rows < tile)
    for (int w = 0; w < width; w++)
      std::memset(to + (static_cast<size_t>(w) * tile + rows) * 4, 0, static_cast<size_t>(tile - rows) * 4);
}

// Two numbers of mxfp4 in a byte, as two bytes of what is stored of them: doubled, and with nought in the middle.
struct DoubledPairs {
  explicit DoubledPairs(bool flipped) {
    constexpr int kDoubled[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int flip = flipped ? 128 : 0;
    for (int byte = 0; byte < 256; byte++)
      pairs[byte] = static_cast<uint16_t>((((kDoubled[byte & 15] + 12) ^ flip) & 255) | (((kDoubled[byte >> 4] + 12) ^ flip) & 255) << 8);
  }
  uint16_t pairs[256];
};

float number_at(const uint8_t* from, Numbers kind, size_t i) {
  uint16_t half;
  float whole;
  switch (kind) {
    case Numbers::bfloat16:
      std::memcpy(&half, from + i * 2, 2);
      return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
    case Numbers::float16:
      std::memcpy(&half, from + i * 2, 2);
      return value(Half{half});
    default: std::memcpy(&whole, from + i * 4, 4); return whole;
  }
}

// Takes numbers to where they are stored, as float16 or float32.
struct Store {
  uint8_t* to;
  Numbers kind;

  void operator()(size_t i, float number) const {
    if (kind == Numbers::float16) {
      const Half half = half_of(number);
      std::memcpy(to + i * 2, &half, 2);
    } else {
      std::memcpy(to + i * 4, &number, 4);
    }
  }
};

// Numbers [rows, groups] to [tiles, groups, tile].
template <class Number>
void transpose_numbers(int rows, int groups, int tile, const Number& number, const Store& store) {
  const int tiles = (rows + tile - 1) / tile;
  for (int t = 0; t < tiles; t++)
    for (int g = 0; g < groups; g++)
      for (int place = 0; place < tile; place++) {
        const int row = t * tile + place;
        store((static_cast<size_t>(t) * groups + g) * tile + place, row < rows ? number(static_cast<size_t>(row) * groups + g) : 0.0f);
      }
}

void require_known(bool known, const char* what) {
  if (!known) throw std::invalid_argument(what);
}

uint8_t* slot_of(const Target& target, size_t slot) { return reinterpret_cast<uint8_t*>(target.address) + slot * target.stride; }

const uint8_t* bytes_at(const std::vector<uintptr_t>& given, int number) {
  return reinterpret_cast<const uint8_t*>(given.at(number));
}

}  // namespace

void Arrival::add_packed(int rows, int columns, int group, int bits, bool mxfp4, std::vector<int> given, Numbers factors,
                         std::vector<Target> targets, Numbers stored) {
  require_known(mxfp4 ? bits == 4 && group == 32 : bits == 4 || bits == 8, "bits must be 4 or 8, or those of mxfp4");
  require_known(rows > 0 && columns > 0 && columns % 32 == 0 && columns % group == 0, "columns must divide into groups");
  require_known(given.size() == (mxfp4 ? 2u : 3u) && targets.size() == 3, "there are quanta, scales and biases");
  require_known(stored == Numbers::float16 || stored == Numbers::float32, "factors are stored as floats");
  packed_.push_back({rows, columns, group, bits, mxfp4, std::move(given), factors, std::move(targets), stored});
}

void Arrival::add_plain(size_t count, int given, Numbers from, Target target, Numbers to) {
  require_known(from == to || (from != Numbers::bytes && (to == Numbers::float32 || to == Numbers::float16)),
                "numbers become floats, or stay what they are");
  plain_.push_back({count, given, from, target, to});
}

void Arrival::fill(const std::vector<uintptr_t>& given, size_t slot) const {
  const int tile = kernels().tile;
  const bool flipped = kernels().signed_bytes;
  std::vector<uint8_t> wide;
  for (const Packed& p : packed_) {
    const int bits = p.mxfp4 ? 8 : p.bits, width = p.columns * bits / 32;
    const size_t row_bytes = static_cast<size_t>(p.columns) * p.bits / 8;
    const uint8_t* quanta = bytes_at(given, p.given[0]);
    uint8_t* to = slot_of(p.targets[0], slot);
    const DoubledPairs doubled(flipped);
    for (int first = 0; first < p.rows; first += tile, to += static_cast<size_t>(width) * tile * 4) {
      const int rows = std::min(tile, p.rows - first);
      const uint8_t* from = quanta + first * row_bytes;
      if (p.mxfp4) {
        wide.resize(rows * row_bytes * 2);
        for (size_t i = 0; i < rows * row_bytes; i++) std::memcpy(wide.data() + 2 * i, &doubled.pairs[from[i]], 2);
        transpose_words<Same>(wide.data(), rows, width, tile, to);
      } else if (p.bits == 4) {
        transpose_words<Nibbles>(from, rows, width, tile, to);
      } else if (flipped) {
        transpose_words<Flipped>(from, rows, width, tile, to);
      } else {
        transpose_words<Same>(from, rows, width, tile, to);
      }
    }
    const uint8_t* scales = bytes_at(given, p.given[1]);
    const Store scale{slot_of(p.targets[1], slot), p.stored}, bias{slot_of(p.targets[2], slot), p.stored};
    const int groups = p.columns / p.group;
    if (p.mxfp4) {
      auto half = [&](size_t i) { return std::ldexp(1.0f, scales[i] - 128); };
      transpose_numbers(p.rows, groups, tile, half, scale);
      transpose_numbers(p.rows, groups, tile, [&](size_t i) { return -half(i) * 12.0f; }, bias);
    } else {
      const uint8_t* biases = bytes_at(given, p.given[2]);
      transpose_numbers(p.rows, groups, tile, [&](size_t i) { return number_at(scales, p.factors, i); }, scale);
      transpose_numbers(p.rows, groups, tile, [&](size_t i) { return number_at(biases, p.factors, i); }, bias);
    }
  }
  for (const Plain& p : plain_) {
    const uint8_t* from = bytes_at(given, p.given);
    const Store store{slot_of(p.target, slot), p.to};
    if (p.from == p.to) {
      std::memcpy(store.to, from, p.from == Numbers::bytes ? p.count : p.count * (p.from == Numbers::float32 ? 4 : 2));
    } else {
      for (size_t i = 0; i < p.count; i++) store(i, number_at(from, p.from, i));
    }
  }
}

}  // namespace ingot
