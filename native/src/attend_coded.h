// Pages in fewer bits for attention: unpacked to floats, but for being rotated, which queries and sums are instead.
#pragma once

#include <bit>
#include <cstring>

#include "coded_pages.h"
#include "floats.h"
#include "hadamard.h"
#include "vectors.h"

namespace ingot {
namespace {

inline float brain_at(const uint8_t* from, int index) {
  uint16_t bits;
  std::memcpy(&bits, from + 2 * index, sizeof bits);
  return value(Brain{bits});
}

inline Vec as_floats(IntegerVec numbers) { return __builtin_convertvector(numbers, Vec); }

// 16 levels by 16 codes.
struct Levels {
  explicit Levels(const float* levels, float factor) {
    for (int i = 0; i < 16; i += kVector) stored(of + i, loaded<Vec>(levels + i) * factor);
  }

  INGOT_INLINE inline Vec at(IntegerVec codes) const {
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(of));
#elif defined(__AVX2__)
    const __m256 low = _mm256_load_ps(of), high = _mm256_load_ps(of + 8);
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)codes, 28));  // its sign says which half
    return (Vec)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, (__m256i)codes), _mm256_permutevar8x32_ps(high, (__m256i)codes),
                                 upper);
#else
    Vec found;
    for (int i = 0; i < kVector; i++) found[i] = of[codes[i]];
    return found;
#endif
  }

  alignas(64) float of[16];
};

// body(place, codes) for vectors of a vector's codes; what does not fill one is done by body(place, code).
template <int Bits, class Body>
INGOT_INLINE inline void each_code(const uint8_t* bytes, int size, const Body& body) {
  if constexpr (Bits == 3) {
    const int twos = size / 4, ones = size / 8;
    for (int place = 0; place < size; place++) {
      const int low = bytes[place % twos] >> (place / twos * 2) & 3, high = bytes[twos + place % ones] >> (place / ones) & 1;
      body(place, low | high << 2);
    }
  } else {
    const int n = size * Bits / 8;
    int j = 0;
    for (; j + kVector <= n; j += kVector) {
      const IntegerVec whole = bytes_at(bytes + j);
      repeated<8 / Bits>([&](auto share) { body(share * n + j, (whole >> (share * Bits)) & ((1 << Bits) - 1)); });
    }
    for (; j < n; j++)
      repeated<8 / Bits>([&](auto share) { body(share * n + j, bytes[j] >> (share * Bits) & ((1 << Bits) - 1)); });
  }
}

template <int Bits>
void unpack_affine(const CodedSide& side, const uint8_t* page, int size, const float* centre, float* to) {
  const int groups = size / side.group, bytes = size * Bits / 8;
  for (int key = 0; key < kKeyBlock; key++, to += size) {
    const uint8_t* scales = page + side.scales + static_cast<size_t>(key) * 4 * groups;
    auto step = [&](int place) { return brain_at(scales, place / side.group); };
    auto least = [&](int place) { return brain_at(scales, groups + place / side.group); };
    const bool whole = side.group % kVector == 0;
    each_code<Bits>(page + side.codes + static_cast<size_t>(key) * bytes, size, [&](int place, auto code) {
      if constexpr (std::is_same_v<decltype(code), int>) {
        to[place] = fused(static_cast<float>(code), step(place), centre[place] + least(place));
      } else if (whole) {
        stored(to + place, fused(as_floats(code), Vec{} + step(place), loaded<Vec>(centre + place) + least(place)));
      } else {
        for (int i = 0; i < kVector; i++)
          to[place + i] = fused(static_cast<float>(code[i]), step(place + i), centre[place + i] + least(place + i));
      }
    });
  }
}

template <int Bits>
void unpack_turbo(const CodedSide& side, const uint8_t* page, int size, const float* centre, float* to) {
  const int bytes = size * Bits / 8;
  for (int key = 0; key < kKeyBlock; key++, to += size) {
    const Levels levels(side.levels, brain_at(page + side.scales, key));
    each_code<Bits>(page + side.codes + static_cast<size_t>(key) * bytes, size, [&](int place, auto code) {
      if constexpr (std::is_same_v<decltype(code), int>)
        to[place] = centre[place] + levels.of[code];
      else
        stored(to + place, loaded<Vec>(centre + place) + levels.at(code));
    });
  }
}

template <class Number>
void unpack_plain(const uint8_t* from, size_t count, float* to) {
  for (size_t i = 0; i < count; i++) {
    Number number;
    std::memcpy(&number, from + i * sizeof(Number), sizeof(Number));
    to[i] = ingot::value(number);
  }
}

void unpack_plain(const CodedLayout& layout, const uint8_t* from, size_t count, float* to) {
  layout.halves ? unpack_plain<Half>(from, count, to) : unpack_plain<float>(from, count, to);
}

inline bool is_rotated(const CodedSide& side) { return side.bits > 0 && side.group == 0; }

// Keys or values of a page, as rotated as they are, with the centre, which is so too.
void unpack_side(const CodedLayout& layout, const CodedSide& side, const uint8_t* page, const float* centre, float* to) {
  const int size = layout.size;
  if (side.bits == 0) return unpack_plain(layout, page + side.codes, static_cast<size_t>(kKeyBlock) * size, to);
  if (side.group > 0)
    return side.bits == 8 ? unpack_affine<8>(side, page, size, centre, to) : unpack_affine<4>(side, page, size, centre, to);
  switch (side.bits) {
    case 4: return unpack_turbo<4>(side, page, size, centre, to);
    case 3: return unpack_turbo<3>(side, page, size, centre, to);
    case 2: return unpack_turbo<2>(side, page, size, centre, to);
    default: return unpack_turbo<1>(side, page, size, centre, to);
  }
}

// As codecs rotate.
void turn_forth(const CodedSide& side, int size, float* x) {
  const float even = 1.0f / std::sqrt(static_cast<float>(size));
  for (int i = 0; i < size; i++) x[i] *= side.signs[i] * even;
  transform(x, size);
}

void turn_back(const CodedSide& side, Found found) {
  const float even = 1.0f / std::sqrt(static_cast<float>(found.dim));
  for (int row = 0; row < found.rows; row++) {
    float* x = found.sums + static_cast<size_t>(row) * found.dim;
    transform(x, found.dim);
    for (int i = 0; i < found.dim; i++) x[i] *= side.signs[i] * even;
  }
}

void unpack_page(const Coded& coded, int page, float* keys, float* values) {
  static constexpr float kNothing[kLargestCoded] = {};
  alignas(64) float centre[kLargestCoded];
  const CodedLayout& layout = *coded.layout;
  const uint8_t* from = coded.at(page);
  if (page + 1 < coded.count) ask_for(coded.at(page + 1), layout.head);
  if (layout.centred) {
    unpack_plain(layout, from + layout.centre, layout.size, centre);
    if (is_rotated(layout.keys)) turn_forth(layout.keys, layout.size, centre);
  }
  unpack_side(layout, layout.keys, from, layout.centred ? centre : kNothing, keys);
  unpack_side(layout, layout.values, from, kNothing, values);
}

// The queries that meet unpacked keys.
void turn_queries(const Sight& how, const float* q, int queries, int group, size_t stride, bool packed, const CodedLayout& layout,
                  const Tile& tile, const CodedTile& to) {
  for (int row = 0; row < queries * group; row++) {
    float* own = to.turned + static_cast<size_t>(row) * how.dim;
    std::memcpy(own, q + row / group * stride + static_cast<size_t>(row % group) * how.dim, sizeof(float) * how.dim);
    turn_forth(layout.keys, how.dim, own);
  }
  Tile turned = tile;
  turned.q = to.q;
  take_queries(how, to.turned, queries, group, static_cast<size_t>(group) * how.dim, packed, turned);
}

}  // namespace
}  // namespace ingot
