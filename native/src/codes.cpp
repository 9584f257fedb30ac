#include "codes.h"

#include <algorithm>
#include <cmath>

#include "centres.h"
#include "code_bits.h"
#include "folded.h"
#include "hadamard.h"
#include "numbers.h"

namespace ingot {
namespace {

struct Sums {
  float square, product;  // of levels with themselves, and with what they stand for
};

// The levels above nought and the borders between them.
template <int Bits>
class Levels {
 public:
  static constexpr int kHalf = 1 << (Bits - 1);

  // They are looked up by the last bits of codes, whatever is above those.
  explicit Levels(const TurboCode& code) {
    for (int at = 0; at < kTable; at++) {
      const int found = at % kHalf;
      levels_[at] = code.levels[kHalf + found];
      for (int step = kHalf / 2, row = 0; step > 0; step /= 2, row++)
        borders_[row][at] = code.borders[found / (2 * step) * (2 * step) + step - 1];
    }
  }

  // Of numbers' sizes: the code of each, by how many borders are below it, and the level there.
  INGOT_INLINE inline IntegerVec codes(Vec size) const {
    IntegerVec found = IntegerVec{} + kHalf;
#if defined(__AVX2__)
    // By halves: which border is next depends on those that were met.
    repeated<Bits - 1>([&](auto row) {
      constexpr int kStep = kHalf >> (row + 1);
      const Vec border = row == 0 ? Vec{} + borders_[0][0] : picked(borders_[row], found);
      found -= (size > border) & -kStep;
    });
#else
    repeated<Bits - 1>([&](auto row) {
      constexpr int kStep = kHalf >> (row + 1);
      repeated<(1 << row)>([&](auto at) { found -= size > borders_[row][2 * kStep * at]; });
    });
#endif
    return found;
  }

  INGOT_INLINE inline Vec at(IntegerVec codes) const { return picked(levels_, codes); }

 private:
  static constexpr int kTable = kVector > 8 ? kVector : 8;  // what one instruction looks numbers up in
  alignas(64) float levels_[kTable] = {}, borders_[3][kTable] = {};

  INGOT_INLINE static inline Vec picked(const float* table, IntegerVec at) {
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)at, _mm512_load_ps(table));
#elif defined(__AVX2__)
    return (Vec)_mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)at);
#else
    Vec level = Vec{} + table[0];
    repeated<kHalf - 1>([&](auto k) { level = at > kHalf + k.value ? Vec{} + table[k + 1] : level; });
    return level;
#endif
  }
};

// The codes of a vector's numbers times `scale`, packed.
template <int Bits, class Size>
INGOT_INLINE inline Sums choose(const Levels<Bits>& levels, const float* x, Size size, float scale, uint8_t* bytes) {
  constexpr int kHalf = 1 << (Bits - 1);
  Vec squares = {}, products = {};
  auto chosen = [&](int at) INGOT_INLINE {
    const Vec v = loaded<Vec>(x + at) * scale, far = std::bit_cast<Vec>(std::bit_cast<IntegerVec>(v) & 0x7fffffff);
    const IntegerVec found = levels.codes(far);
    const Vec level = levels.at(found);
    squares = fused(level, level, squares);
    products = fused(level, far, products);
    // Below nought they are counted the other way round.
    return found ^ (v > 0.0f ? IntegerVec{} : IntegerVec{} + (2 * kHalf - 1));
  };
  if (const int n = size * Bits / 8; Bits != 3 && n % kVector == 0) {
    // Codes that share bytes are put together before they are bytes.
    put_all_bytes(bytes, n, [&](int at) INGOT_INLINE {
      IntegerVec all = {};
      repeated<8 / Bits>([&](auto share) INGOT_INLINE { all |= chosen(at + share * n) << (share * Bits); });
      return all;
    });
  } else {
    alignas(64) uint8_t codes[kLargestVector];
    put_all_bytes(codes, size, chosen);
    pack<Bits>(codes, size, bytes);
  }
  return {sum(squares), sum(products)};
}

// Vectors that go through a step before the next one is begun: they do not wait for each other, steps do.
constexpr size_t kTogether = 8;

// body(first, count) for all of them, a few at a time.
template <class Body>
inline void few_by_few(size_t vectors, const Body& body) {
  for (size_t first = 0; first < vectors; first += kTogether) body(first, std::min(kTogether, vectors - first));
}

template <int Bits, class Size, class N>
void turbo_encode(const TurboCode& code, Size size, const N* from, size_t vectors, const Centres& centres, uint8_t* bytes,
                  uint16_t* lengths) {
  alignas(64) float x[kTogether][kLargestVector];
  float length[kTogether];
  uint16_t sign[kTogether];
  const float even = 1.0f / std::sqrt(static_cast<float>(size));
  const Levels<Bits> levels(code);
  few_by_few(vectors, [&](size_t first, size_t count) {
    for (size_t i = 0; i < count; i++) {
      auto turned = [&](auto v, int at) { stored(x[i] + at, v * loaded<decltype(v)>(code.signs + at)); };
      const Taken taken = around_nearer(from + (first + i) * size, centres, size, turned);
      length[i] = std::sqrt(taken.squares), sign[i] = taken.sign;
    }
    for (size_t i = 0; i < count; i++) transform(x[i], size);
    for (size_t i = 0; i < count; i++) {
      const Sums sums = choose<Bits>(levels, x[i], size, 1.0f / std::max(length[i], 1e-30f), bytes + (first + i) * (size * Bits / 8));
      const float factor = code.keeps_length ? length[i] / std::sqrt(sums.square) : length[i] * even * sums.product / sums.square;
      lengths[first + i] = brain_of(factor).bits | sign[i];
    }
  });
}

// Each code's level times a factor.
void look_up(const float* levels, const uint8_t* codes, int size, float factor, float* x) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_load_ps(levels) * factor;
  for (int i = 0; i < size; i += 16) _mm512_store_ps(x + i, _mm512_permutexvar_ps((__m512i)bytes_at(codes + i), table));
#elif defined(__AVX2__)
  const __m256 low = _mm256_load_ps(levels) * factor, high = _mm256_load_ps(levels + 8) * factor;
  for (int i = 0; i < size; i += 8) {
    const __m256i at = (__m256i)bytes_at(codes + i);
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));  // its sign says which half
    _mm256_store_ps(x + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at), upper));
  }
#elif defined(__aarch64__)
  alignas(64) float scaled[16];
  for (int level = 0; level < 16; level++) scaled[level] = levels[level] * factor;
  // A table for each of a float's four bytes; storing puts them together.
  const uint8x16x4_t table = vld4q_u8(reinterpret_cast<const uint8_t*>(scaled));
  for (int i = 0; i < size; i += 16) {
    const uint8x16_t at = vld1q_u8(codes + i);
    uint8x16x4_t found;
    repeated<4>([&](auto byte) { found.val[byte] = vqtbl1q_u8(table.val[byte], at); });
    vst4q_u8(reinterpret_cast<uint8_t*>(x + i), found);
  }
#else
  for (int i = 0; i < size; i++) x[i] = levels[codes[i]] * factor;
#endif
}

#if defined(__AVX2__)
// Levels that are looked up by the last bits of codes, whatever is above those.
template <int Bits>
class Table {
 public:
  Table(const float* levels, float factor) {
    alignas(64) float all[16];
    repeated<16>([&](auto i) { all[i] = levels[i & ((1 << Bits) - 1)]; });
    repeated<16 / kVector>([&](auto part) { parts_[part] = loaded<Vec>(all + part * kVector) * factor; });
  }

  INGOT_INLINE inline Vec at(IntegerVec codes) const {
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)codes, (__m512)parts_[0]);
#else
    const __m256i at = (__m256i)codes;
    const __m256 lower = _mm256_permutevar8x32_ps((__m256)parts_[0], at);
    if constexpr (Bits < 4) return (Vec)lower;
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));  // its sign says which half
    return (Vec)_mm256_blendv_ps(lower, _mm256_permutevar8x32_ps((__m256)parts_[1], at), upper);
#endif
  }

 private:
  Vec parts_[16 / kVector];
};

// Vectors of a size that registers hold.
template <int Bits, int Size, class N>
void turbo_decode_in_registers(const TurboCode& code, const uint8_t* bytes, const uint16_t* lengths, N* to, size_t vectors,
                               const Centres& centres) {
  constexpr int kParts = Size / kVector;
  const float even = 1.0f / std::sqrt(static_cast<float>(Size));
  for (size_t row = 0; row < vectors; row++, bytes += Size * Bits / 8, to += Size) {
    const Table<Bits> table(code.levels, std::fabs(value(Brain{lengths[row]})) * even);
    const float* centre = centres.of(lengths[row]);
    Vec v[kParts];
    repeated<kParts>([&](auto i) { v[i] = within<1>(table.at(codes_at<Bits, Size, i * kVector>(bytes))); });
    across<1, kParts>(v);
    repeated<kParts>([&](auto i) {
      constexpr int kAt = i * kVector;
      stored(to + kAt, fused(v[i], loaded<Vec>(code.signs + kAt), loaded<Vec>(centre + kAt)));
    });
  }
}
#endif

template <int Bits, class N>
void turbo_decode(const TurboCode& code, const uint8_t* bytes, const uint16_t* lengths, N* to, size_t vectors,
                  const Centres& centres) {
#if defined(__AVX2__)
  if (code.size == 64) return turbo_decode_in_registers<Bits, 64>(code, bytes, lengths, to, vectors, centres);
  if (code.size == 128) return turbo_decode_in_registers<Bits, 128>(code, bytes, lengths, to, vectors, centres);
#endif
  alignas(64) float x[kTogether][kLargestVector], levels[16] = {};
  alignas(64) uint8_t found[kTogether][kLargestVector];
  const int size = code.size;
  const float even = 1.0f / std::sqrt(static_cast<float>(size));
  std::copy_n(code.levels, 1 << Bits, levels);
  few_by_few(vectors, [&](size_t first, size_t count) {
    for (size_t i = 0; i < count; i++) unpack<Bits>(bytes + (first + i) * (size * Bits / 8), size, found[i]);
    for (size_t i = 0; i < count; i++) look_up(levels, found[i], size, std::fabs(value(Brain{lengths[first + i]})) * even, x[i]);
    for (size_t i = 0; i < count; i++) transform(x[i], size);
    for (size_t i = 0; i < count; i++) {
      N* numbers = to + (first + i) * size;
      const float* centre = centres.of(lengths[first + i]);
      for (int at = 0; at < size; at += kVector)
        stored(numbers + at, fused(loaded<Vec>(x[i] + at), loaded<Vec>(code.signs + at), loaded<Vec>(centre + at)));
    }
  });
}

// body(bits) with a code's bits as a constant.
template <class Body>
void with_bits(int bits, const Body& body) {
  switch (bits) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
  }
}

// body(size) with a vector's size, which is a constant where it is a usual one.
template <class Body>
void with_size(int size, const Body& body) {
  switch (size) {
    case 64: return body(std::integral_constant<int, 64>{});
    case 128: return body(std::integral_constant<int, 128>{});
    default: return body(size);
  }
}

void turbo_encode_any(const TurboCode& code, const Vectors& from, uint8_t* bytes, uint16_t* lengths) {
  as_kind(from, [&](auto* numbers) {
    with_bits(code.bits, [&](auto bits) {
      with_size(code.size, [&](auto size) {
        turbo_encode<bits>(code, size, numbers, from.count, centres_of(from), bytes, lengths);
      });
    });
  });
}

void turbo_decode_any(const TurboCode& code, const uint8_t* bytes, const uint16_t* lengths, const Vectors& to) {
  as_kind(to, [&](auto* numbers) {
    with_bits(code.bits, [&](auto bits) { turbo_decode<bits>(code, bytes, lengths, numbers, to.count, centres_of(to)); });
  });
}

constexpr float kSlack = 1.0f / 128;
constexpr float kRounding = 12582912.0f;  // so large that its last bit is worth one

// The first where it is smaller, or larger, and else the second: also where one of them is no number.
inline float smaller(float one, float other) { return one < other ? one : other; }
inline float larger(float one, float other) { return one > other ? one : other; }

#if defined(__AVX512F__)
inline Vec smaller(Vec one, Vec other) { return (Vec)_mm512_min_ps((__m512)one, (__m512)other); }
inline Vec larger(Vec one, Vec other) { return (Vec)_mm512_max_ps((__m512)one, (__m512)other); }
#elif defined(__AVX2__)
inline Vec smaller(Vec one, Vec other) { return (Vec)_mm256_min_ps((__m256)one, (__m256)other); }
inline Vec larger(Vec one, Vec other) { return (Vec)_mm256_max_ps((__m256)one, (__m256)other); }
#else
inline Vec smaller(Vec one, Vec other) { return one < other ? one : other; }
inline Vec larger(Vec one, Vec other) { return one > other ? one : other; }
#endif

struct Ends {
  float low, high;
};

// The least and the largest of some numbers.
template <class Size>
INGOT_INLINE inline Ends ends_of(const float* x, Size size) {
  auto both = [x, size](auto low, int each, const auto& at) INGOT_INLINE {
    auto high = low;
    for (int i = each; i < size; i += each) low = smaller(at(x + i), low), high = larger(at(x + i), high);
    return std::pair(low, high);
  };
  if (size % kVector != 0) {
    const auto [low, high] = both(x[0], 1, [](const float* from) { return *from; });
    return {low, high};
  }
  const auto [low, high] = both(loaded<Vec>(x), kVector, [](const float* from) { return loaded<Vec>(from); });
  return {folded(low, [](Vec one, Vec other) { return smaller(other, one); }), folded(high, [](Vec one, Vec other) { return larger(other, one); })};
}

struct Steps {
  Brain least, each;
};

template <class Size>
INGOT_INLINE inline Steps steps_of(const float* x, Size size, float last) {
  const auto [low, high] = ends_of(x, size);
  const Brain least = brain_of(low - std::fabs(low) * kSlack), each = brain_of((high - value(least)) * ((1 + kSlack) / last));
  return {least, value(each) > 0 ? each : brain_of(1.0f)};
}

template <class Size>
INGOT_INLINE inline void count_steps(const float* x, Size size, Steps steps, float last, uint8_t* codes) {
  const float start = value(steps.least), factor = 1.0f / value(steps.each);
  auto counted = [=](auto number) INGOT_INLINE {
    using Some = decltype(number);
    return smaller(larger((number - start) * factor, Some{}), Some{} + last) + kRounding;
  };
  int i = put_all_bytes(codes, size, [&](int at) INGOT_INLINE {
    return std::bit_cast<IntegerVec>(counted(loaded<Vec>(x + at))) - std::bit_cast<int32_t>(kRounding);
  });
  for (; i < size; i++)
    codes[i] = static_cast<uint8_t>(std::bit_cast<int32_t>(counted(x[i])) - std::bit_cast<int32_t>(kRounding));
}

// `each` is a group's size.
template <class Size, class N>
void affine_encode(const AffineCode& code, Size each, const N* from, size_t vectors, const Centres& centres, uint8_t* bytes,
                   uint16_t* scales) {
  alignas(64) float x[kTogether][kLargestVector];
  alignas(64) uint8_t found[kLargestVector];
  uint16_t sign[kTogether];
  const int groups = code.size / each;
  const float last = static_cast<float>((1 << code.bits) - 1);
  few_by_few(vectors, [&](size_t first, size_t count) {
    for (size_t i = 0; i < count; i++) {
      auto kept = [&](auto v, int at) { stored(x[i] + at, v); };
      sign[i] = around_nearer(from + (first + i) * code.size, centres, code.size, kept).sign;
    }
    for (size_t i = 0; i < count; i++) {
      uint16_t *steps = scales + (first + i) * 2 * groups, *leasts = steps + groups;
      for (int group = 0; group < groups; group++) {
        const Steps own = steps_of(x[i] + group * each, each, last);
        steps[group] = own.each.bits, leasts[group] = own.least.bits;
      }
    }
    for (size_t i = 0; i < count; i++) {
      uint16_t *steps = scales + (first + i) * 2 * groups, *leasts = steps + groups;
      uint8_t *to = bytes + (first + i) * (code.size * code.bits / 8), *codes = code.bits == 8 ? to : found;
      for (int group = 0; group < groups; group++) {
        const int at = group * each;
        count_steps(x[i] + at, each, {Brain{leasts[group]}, Brain{steps[group]}}, last, codes + at);
      }
      steps[0] |= sign[i];
      if (code.bits == 4) pack<4>(found, code.size, to);
    }
  });
}

template <class N>
void affine_decode(const AffineCode& code, const uint8_t* bytes, const uint16_t* scales, N* to, size_t count,
                   const Centres& centres) {
  alignas(64) uint8_t found[kLargestVector];
  const int groups = code.size / code.group;
  for (size_t row = 0; row < count; row++) {
    const uint8_t *from = bytes + row * (code.size * code.bits / 8), *codes = code.bits == 8 ? from : found;
    if (code.bits == 4) unpack<4>(from, code.size, found);
    const uint16_t *steps = scales + row * 2 * groups, *leasts = steps + groups;
    const float* centre = centres.of(steps[0]);
    N* numbers = to + row * code.size;
    for (int group = 0; group < groups; group++) {
      const float step = std::fabs(value(Brain{steps[group]})), least = value(Brain{leasts[group]});
      int i = group * code.group;
      const int end = i + code.group;
      for (; i + kVector <= end; i += kVector)
        stored(numbers + i, __builtin_convertvector(bytes_at(codes + i), Vec) * step + least + loaded<Vec>(centre + i));
      for (; i < end; i++) put(numbers[i], static_cast<float>(codes[i]) * step + least + centre[i]);
    }
  }
}

void affine_encode_any(const AffineCode& code, const Vectors& from, uint8_t* bytes, uint16_t* scales) {
  as_kind(from, [&](auto* numbers) {
    with_size(code.group, [&](auto each) { affine_encode(code, each, numbers, from.count, centres_of(from), bytes, scales); });
  });
}

void affine_decode_any(const AffineCode& code, const uint8_t* bytes, const uint16_t* scales, const Vectors& to) {
  as_kind(to, [&](auto* numbers) { affine_decode(code, bytes, scales, numbers, to.count, centres_of(to)); });
}

}  // namespace

extern const Codes INGOT_NAME(codes);
const Codes INGOT_NAME(codes) = {turbo_encode_any, turbo_decode_any, affine_encode_any, affine_decode_any};

}  // namespace ingot
