// Rows and a page in fewer bits. Products are of codes, or of their levels, and scaled by key afterwards; what is rotated stays so,
// as queries and sums are turned instead. Neither depends on how many rows there are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "attend_block.h"
#include "coded_pages.h"
#include "floats.h"
#include "hadamard.h"
#include "vectors.h"

namespace ingot {
namespace {

inline Vec as_floats(IntegerVec numbers) { return __builtin_convertvector(numbers, Vec); }

inline bool is_rotated(const CodedSide& side) { return side.bits > 0 && side.group == 0; }

// Codes of eight bits, as attention reads numbers.
struct Byte {
  uint8_t code;
};

inline float value(Byte byte) { return byte.code; }

template <class V>
inline V loaded(const Byte* from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64)
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32)
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
  V v;
  for (size_t i = 0; i < sizeof(V) / sizeof(float); i++) v[i] = value(from[i]);
  return v;
}

// Each code's level: of its last four bits.
INGOT_INLINE inline Vec levels_at(const float* levels, IntegerVec codes) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(levels));
#elif defined(__AVX2__)
  const __m256 low = _mm256_loadu_ps(levels), high = _mm256_loadu_ps(levels + 8);
  const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)codes, 28));  // its sign says which half
  return (Vec)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, (__m256i)codes), _mm256_permutevar8x32_ps(high, (__m256i)codes), upper);
#else
  Vec found;
  for (int i = 0; i < kVector; i++) found[i] = levels[codes[i] & 15];
  return found;
#endif
}

// A page's keys or values: of each vector as many groups of `dims` numbers as have a scale of their own. What a code stands for
// is a count, or a level, times its group's factor, and a count has the group's least besides.
struct CodedVectors {
  CodedVectors(const CodedLayout& layout, const CodedSide& side, const uint8_t* page)
      : side(side), codes(page + side.codes), scales(page + side.scales), size(layout.size), halves(layout.halves),
        bytes(size * side.bits / 8), groups(side.group > 0 ? size / side.group : 1), dims(size / groups) {}

  bool counts() const { return side.group > 0; }

  // [kKeyBlock] of a group. Numbers that are as they were computed have none.
  void factors(int group, float* steps, float* leasts) const {
    if (!counts()) std::fill(leasts, leasts + kKeyBlock, 0.0f);
    if (side.bits == 0) return std::fill(steps, steps + kKeyBlock, 1.0f);
    const uint16_t* from = reinterpret_cast<const uint16_t*>(scales) + group;
    if (!counts()) return every<1>(from, 1, steps);
    if (groups == 1) return every<2>(from, 2, steps), every<2>(from + 1, 2, leasts);
    if (groups == 2) return every<4>(from, 4, steps), every<4>(from + 2, 4, leasts);
    every<0>(from, 2 * groups, steps);
    every<0>(from + groups, 2 * groups, leasts);
  }

  // All of them, unscaled: [kKeyBlock, size].
  void unpack(float* to) const;

  // Whether whole vectors can be read as they lie: those of one half of the columns where codes share bytes, or of both.
  bool whole() const {
    if (side.bits == 8) return dims % kVector == 0;
    return side.bits == 4 && (groups == 1 ? size / 2 % (kWide / 2 * kVector) == 0 : size / 2 % dims == 0 && dims % kVector == 0);
  }

 private:
  // One of `Each` numbers, or of `each`, where that is not known.
  template <int Each>
  static void every(const uint16_t* from, int each, float* to) {
    for (int key = 0; key < kKeyBlock; key++) to[key] = value(Brain{from[key * (Each > 0 ? Each : each)]});
  }

 public:

  const CodedSide& side;
  const uint8_t *codes, *scales;
  int size;
  bool halves;
  int bytes, groups, dims;
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
void unpack_codes(const CodedVectors& from, float* to) {
  for (int key = 0; key < kKeyBlock; key++, to += from.size)
    each_code<Bits>(from.codes + static_cast<size_t>(key) * from.bytes, from.size, [&](int place, auto code) {
      if constexpr (std::is_same_v<decltype(code), int>)
        to[place] = from.counts() ? static_cast<float>(code) : from.side.levels[code];
      else
        stored(to + place, from.counts() ? as_floats(code) : levels_at(from.side.levels, code));
    });
}

void unpack_plain(bool halves, const uint8_t* from, size_t count, float* to) {
  if (halves)
    widen(reinterpret_cast<const Half*>(from), count, to);
  else
    std::memcpy(to, from, sizeof(float) * count);
}

void CodedVectors::unpack(float* to) const {
  switch (side.bits) {
    case 0: return unpack_plain(halves, codes, static_cast<size_t>(kKeyBlock) * size, to);
    case 1: return unpack_codes<1>(*this, to);
    case 2: return unpack_codes<2>(*this, to);
    case 3: return unpack_codes<3>(*this, to);
    case 4: return unpack_codes<4>(*this, to);
    default: return unpack_codes<8>(*this, to);
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

// Queries times the scale, as they are and as they meet codes; and of the latter what groups of dims add up to.
void take_coded_queries(const Sight& how, const float* q, int queries, int group, size_t stride, bool packed,
                        const CodedLayout& layout, const Tile& tile, const CodedTile& to) {
  const int dim = how.dim, rows = queries * group, dims = layout.keys.group > 0 ? layout.keys.group : dim;
  for (int row = 0; row < rows; row++) {
    const float* from = q + row / group * stride + static_cast<size_t>(row % group) * dim;
    float *own = to.plain + static_cast<size_t>(row) * dim, *turned = to.turned + static_cast<size_t>(row) * dim;
    for (int d = 0; d < dim; d++) own[d] = from[d] * how.scale;
    std::memcpy(turned, own, sizeof(float) * dim);
    if (is_rotated(layout.keys)) turn_forth(layout.keys, dim, turned);
    for (int begin = 0; begin < dim; begin += dims)
      to.sums[static_cast<size_t>(row) * (dim / dims) + begin / dims] =
          total_of(dims, [&](auto sum, auto at) { return sum + at(turned + begin); });
  }
  if (!packed) return;
  Tile laid = tile;
  laid.q = to.q;
  take_queries({dim, 1.0f, 0, 0}, to.turned, queries, group, static_cast<size_t>(group) * dim, packed, laid);
}

// use(stride, dims) with those of usual heads as constants.
template <class Use>
INGOT_INLINE inline void with_dims(int stride, int dims, const Use& use) {
  constexpr std::integral_constant<int, 64> kSmall;
  constexpr std::integral_constant<int, 128> kLarge;
  if (dims == kSmall && stride == kSmall) return use(kSmall, kSmall);
  if (dims == kSmall && stride == kLarge) return use(kLarge, kSmall);
  use(stride, dims);
}

// Products of rows with a group's codes, as counts or levels: [rows, kKeyBlock].
template <class Number>
void dots(const CodedTile& tile, int rows, bool packed, const Number* keys, int size, int begin, int dims, float* panel, Soon& soon, float* out) {
  if (packed) {
    for (int panel_begin = 0; panel_begin < kKeyBlock; panel_begin += kPanel) {
      soon.ask(kPanel * dims);
      turn_keys(keys + begin, panel_begin, 0, kKeyBlock, dims, size, panel);
      for (int row = 0; row < rows; row += kRows)
        panel_scores(tile.q + static_cast<size_t>(row) * size + static_cast<size_t>(begin) * kRows, panel, dims,
                     out + static_cast<size_t>(row) * kKeyBlock + panel_begin);
    }
    return;
  }
  in_fours(rows, [&](size_t row, auto count) {
    constexpr int R = decltype(count)::value, K = kScored<R>;
    with_dims(size, dims, [&](auto stride, auto some) {
      const float* q = tile.turned + row * stride + begin;
      Soon own = soon;  // which stays in registers
      for (int j = 0; j < kKeyBlock; j += K) {
        const Number* from = keys + static_cast<size_t>(j) * stride + begin;
        few_scores<R>(q, [=](int i) { return from + static_cast<size_t>(i) * stride; }, stride, some, out + row * kKeyBlock + j,
                      [&]() INGOT_INLINE { own.ask(K * kVector); });
      }
      soon = own;
    });
  });
}

void score_codes(const CodedLayout& layout, const uint8_t* page, int rows, bool packed, const Tile& tile, const CodedTile& room, Soon soon) {
  const CodedVectors keys(layout, layout.keys, page);
  const int size = layout.size;
  alignas(64) float centre[kLargestCoded], steps[kKeyBlock], leasts[kKeyBlock];
  if (layout.centred) unpack_plain(layout.halves, page + layout.centre, size, centre);
  const bool direct = keys.side.bits == 8 && !packed;
  if (!direct) keys.unpack(room.keys);
  for (int group = 0; group < keys.groups; group++) {
    const int begin = group * keys.dims;
    if (direct)
      dots(room, rows, packed, reinterpret_cast<const Byte*>(keys.codes), size, begin, keys.dims, tile.panel, soon, room.products);
    else
      dots(room, rows, packed, room.keys, size, begin, keys.dims, tile.panel, soon, room.products);
    keys.factors(group, steps, leasts);
    for (int row = 0; row < rows; row++) {
      const float sum = room.sums[static_cast<size_t>(row) * keys.groups + group];
      const float* products = room.products + static_cast<size_t>(row) * kKeyBlock;
      float* scores = tile.scores + static_cast<size_t>(row) * kKeyBlock;
      float common = 0;
      if (group == 0 && layout.centred) {
        const float* own = room.plain + static_cast<size_t>(row) * size;
        common = total_of(size, [&](auto before, auto at) { return fused(at(own), at(centre), before); });
      }
      for (int j = 0; j < kKeyBlock; j += kVector) {
        const Vec before = group == 0 ? Vec{} + common : loaded<Vec>(scores + j);
        stored(scores + j, fused(loaded<Vec>(products + j), loaded<Vec>(steps + j), fused(loaded<Vec>(leasts + j), Vec{} + sum, before)));
      }
    }
  }
}

constexpr int kPair = kWide / 2;  // vectors of either half that are summed up at once, where codes share bytes

// sums = sums * worth + weights . a group's codes, which are read as they lie, or `unpacked`.
template <int R>
void sum_codes(const CodedVectors& values, const float* weights, const float* unpacked, int begin, const float* worth, Soon& soon, float* sums) {
  constexpr int W = kWide;
  const int size = values.size, half = size / 2, end = begin + values.dims;
  Soon own = soon;  // which stays in registers
  auto some = [&](auto wide, int d, const auto& values_at, const auto& place) INGOT_INLINE {
    auto at = [&](int j, int b) INGOT_INLINE {
      if (b == 0) own.ask();
      return values_at(j, b);
    };
    sums_of<R, decltype(wide)::value>(weights, at, 0, kKeyBlock, size, worth, sums + d, place);
  };
  constexpr std::integral_constant<int, W> kSeveral;
  constexpr std::integral_constant<int, 1> kOne;
  // Of codes that share bytes both at once.
  auto halves = [&](auto number) {
    for (int d = 0; d < half; d += kPair * kVector) {
      auto at = [from = values.codes + d, half, number](int j, int b) INGOT_INLINE {
        return number(bytes_at(from + j * half + b % kPair * kVector) >> (b / kPair * 4));
      };
      some(kSeveral, d, at, [half](int b) { return b % kPair * kVector + b / kPair * half; });
    }
  };
  auto all = [&](auto values_at) {
    int d = begin;
    for (; d + W * kVector <= end; d += W * kVector) some(kSeveral, d, values_at(d), in_order);
    for (; d + kVector <= end; d += kVector) some(kOne, d, values_at(d), in_order);
    return d;
  };
  // What lies behind one another is of one half of the columns: the bytes' lower or upper codes.
  auto codes_at = [&](int d) {
    return [from = values.codes + d % half, half, shift = d / half * 4](int j, int b) { return bytes_at(from + j * half + b * kVector) >> shift; };
  };
  if (unpacked == nullptr && values.side.bits == 8) {
    all([&](int d) {
      return [from = reinterpret_cast<const Byte*>(values.codes) + d, size](int j, int b) { return loaded<Vec>(from + j * size + b * kVector); };
    });
  } else if (unpacked == nullptr && values.groups > 1) {
    all([&](int d) { return [codes = codes_at(d)](int j, int b) { return as_floats(codes(j, b) & 15); }; });
  } else if (unpacked == nullptr && values.counts()) {
    halves([](IntegerVec codes) { return as_floats(codes & 15); });
  } else if (unpacked == nullptr) {
    halves([levels = values.side.levels](IntegerVec codes) { return levels_at(levels, codes); });
  } else {
    int d = all([&](int d) { return [from = unpacked + d, size](int j, int b) { return loaded<Vec>(from + static_cast<size_t>(j) * size + b * kVector); }; });
    for (; d < end; d++)
      for (int a = 0; a < R; a++) {
        float part = 0;
        for (int j = 0; j < kKeyBlock; j++) part = fused(unpacked[static_cast<size_t>(j) * size + d], weights[static_cast<size_t>(a) * kKeyBlock + j], part);
        float& at = sums[static_cast<size_t>(a) * size + d];
        at = fused(at, worth[a], part);
      }
  }
  soon = own;
}

void sum_up_codes(const CodedLayout& layout, const uint8_t* page, int rows, const Tile& tile, const CodedTile& room, Soon soon, Found found) {
  const CodedVectors values(layout, layout.values, page);
  const int size = layout.size;
  alignas(64) float steps[kKeyBlock], leasts[kKeyBlock];
  const bool direct = rows < kPacked && values.whole();  // for many rows that would take longer
  if (!direct) values.unpack(tile.values);
  for (int group = 0; group < values.groups; group++) {
    values.factors(group, steps, leasts);
    const int begin = group * values.dims;
    for (int row = 0; row < rows; row++) {
      const float* weights = tile.scores + static_cast<size_t>(row) * kKeyBlock;
      float* own = room.products + static_cast<size_t>(row) * kKeyBlock;
      for (int j = 0; j < kKeyBlock; j += kVector) stored(own + j, loaded<Vec>(weights + j) * loaded<Vec>(steps + j));
    }
    in_fours(rows, [&](size_t row, auto count) {
      sum_codes<decltype(count)::value>(values, room.products + row * kKeyBlock, direct ? nullptr : tile.values, begin,
                                        tile.worth + row, soon, found.sums + row * size);
    });
    if (!values.counts()) continue;
    for (int row = 0; row < rows; row++) {
      const float* weights = tile.scores + static_cast<size_t>(row) * kKeyBlock;
      const float least = total_of(kKeyBlock, [&](auto sum, auto at) { return fused(at(weights), at(leasts), sum); });
      float* sums = found.sums + static_cast<size_t>(row) * size + begin;
      each(values.dims, sums, [=](auto at) { return at(sums) + least; });
    }
  }
}

Soon soon_read(const CodedLayout& layout, const CodedSide& side, const uint8_t* page) {
  return soon_read(page + side.codes, static_cast<size_t>(kKeyBlock) * layout.size * side.bits / 8);
}

// What the rows find in a coded page, all of whose keys they see. Its values are asked for while keys are scored, and the next
// one's keys while values are summed up.
void meet_coded(const Coded& coded, int page, float cap, int rows, bool packed, const Tile& tile, const CodedTile& room, Found found) {
  const CodedLayout& layout = *coded.layout;
  const uint8_t* at = coded.at(page);
  const Soon values = soon_read(layout, layout.values, at);
  const Soon next = page + 1 < coded.count ? soon_read(layout, layout.keys, coded.at(page + 1)) : Soon{};
  score_codes(layout, at, rows, packed, tile, room, values);
  in_fours(rows, [&](int row, auto count) {
    weighed<decltype(count)::value>(tile.scores + static_cast<size_t>(row) * kKeyBlock, [](int) { return std::pair{0, kKeyBlock}; }, cap,
                                    found.largest + row, found.total + row, tile.worth + row);
  });
  sum_up_codes(layout, at, rows, tile, room, next, found);
}

}  // namespace
}  // namespace ingot
