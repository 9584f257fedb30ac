#include "codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#include "hadamard.h"
#include "vectors.h"

namespace ingot {
namespace {

// The nearest one, and of two the even one.
inline uint16_t brain_of(float number) {
  const uint32_t bits = std::bit_cast<uint32_t>(number);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void widen(const Vectors& from, size_t row, int size, float* to) {
  const size_t at = row * size;
  if (from.kind == Number::single) {
    std::memcpy(to, static_cast<const float*>(from.numbers) + at, sizeof(float) * size);
  } else if (from.kind == Number::half) {
    const Half* halves = static_cast<const Half*>(from.numbers) + at;
    int i = 0;
    for (; i + kVector <= size; i += kVector) stored(to + i, loaded<Vec>(halves + i));
    for (; i < size; i++) to[i] = value(halves[i]);
  } else {
    const Brain* brains = static_cast<const Brain*>(from.numbers) + at;
    for (int i = 0; i < size; i++) to[i] = value(brains[i]);
  }
  if (from.centre != nullptr)
    for (int i = 0; i < size; i++) to[i] -= from.centre[i];
}

void narrow(float* from, int size, const Vectors& to, size_t row) {
  const size_t at = row * size;
  if (to.centre != nullptr)
    for (int i = 0; i < size; i++) from[i] += to.centre[i];
  if (to.kind == Number::single) {
    std::memcpy(static_cast<float*>(to.numbers) + at, from, sizeof(float) * size);
  } else if (to.kind == Number::half) {
    uint16_t* halves = static_cast<uint16_t*>(to.numbers) + at;
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= size; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#elif defined(__F16C__)
    for (; i + 8 <= size; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#elif defined(__aarch64__)
    for (; i + 4 <= size; i += 4) vst1_u16(halves + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
    for (; i < size; i++) halves[i] = half_of(from[i]).bits;
  } else {
    uint16_t* brains = static_cast<uint16_t*>(to.numbers) + at;
    for (int i = 0; i < size; i++) brains[i] = brain_of(from[i]);
  }
}

inline void put_bytes(uint8_t* to, IntegerVec numbers) {
#if defined(__AVX512F__)
  return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)numbers));
#endif
  const ByteVec bytes = __builtin_convertvector(numbers, ByteVec);
  std::memcpy(to, &bytes, sizeof bytes);
}

inline IntegerVec integers_at(const int32_t* from) {
  IntegerVec numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  return numbers;
}

// Codes in planes of `width` bits, which may be whole bytes: byte j of n has those of places j, j + n, and so on, above `below` bits of each code.
void pack(const int32_t* codes, int size, int width, int below, uint8_t* bytes) {
  const int n = size * width / 8, mask = (1 << width) - 1;
  int j = 0;
  for (; j + kVector <= n; j += kVector) {
    IntegerVec whole = integers_at(codes + j) >> below & mask;
    for (int place = 1; place < 8 / width; place++)
      whole |= (integers_at(codes + place * n + j) >> below & mask) << (place * width);
    put_bytes(bytes + j, whole);
  }
  for (; j < n; j++) {
    int32_t whole = 0;
    for (int place = 0; place < 8 / width; place++) whole |= (codes[place * n + j] >> below & mask) << (place * width);
    bytes[j] = static_cast<uint8_t>(whole);
  }
}

template <bool First>
void unpack(const uint8_t* bytes, int size, int width, int below, int32_t* codes) {
  const int n = size * width / 8, mask = (1 << width) - 1;
  for (int place = 0; place < 8 / width; place++) {
    int32_t* to = codes + place * n;
    int j = 0;
    for (; j + kVector <= n; j += kVector) {
      IntegerVec code = (bytes_at(bytes + j) >> (place * width) & mask) << below;
      if (!First) code |= integers_at(to + j);
      std::memcpy(to + j, &code, sizeof code);
    }
    for (; j < n; j++) {
      const int32_t code = (bytes[j] >> (place * width) & mask) << below;
      to[j] = First ? code : to[j] | code;
    }
  }
}

void pack_all(const int32_t* found, int size, int bits, uint8_t* bytes) {
  if (bits != 3) return pack(found, size, bits, 0, bytes);
  pack(found, size, 2, 0, bytes);
  pack(found, size, 1, 2, bytes + size / 4);
}

void unpack_all(const uint8_t* bytes, int size, int bits, int32_t* found) {
  if (bits != 3) return unpack<true>(bytes, size, bits, 0, found);
  unpack<true>(bytes, size, 2, 0, found);
  unpack<false>(bytes + size / 4, size, 1, 2, found);
}

struct Sums {
  float square, product;  // of levels with themselves, and with what they stand for
};

// Where a number lies above a border, it has one more of them below it, and this level.
INGOT_INLINE inline void raise(Vec size, float border, float to, IntegerVec& above, Vec& level) {
#if defined(__AVX512F__)
  const __mmask16 more = _mm512_cmp_ps_mask((__m512)size, _mm512_set1_ps(border), _CMP_GT_OQ);
  above = (IntegerVec)_mm512_mask_add_epi32((__m512i)above, more, (__m512i)above, _mm512_set1_epi32(1));
  level = (Vec)_mm512_mask_mov_ps((__m512)level, more, _mm512_set1_ps(to));
#else
  const IntegerVec more = size > border;
  above -= more;
  level = more ? Vec{} + to : level;
#endif
}

template <int Bits>
Sums choose(const TurboCode& code, const float* x, float scale, int32_t* found) {
  constexpr int kHalf = 1 << (Bits - 1);
  Vec squares = {}, products = {};
  for (int i = 0; i < code.size; i += kVector) {
    const Vec v = loaded<Vec>(x + i) * scale, size = magnitude(v);
    IntegerVec above = {};
    Vec level = Vec{} + code.levels[kHalf];
    repeated<kHalf - 1>([&](auto k) { raise(size, code.borders[k], code.levels[kHalf + 1 + k], above, level); });
    const IntegerVec chosen = v > 0.0f ? above + kHalf : kHalf - 1 - above;
    std::memcpy(found + i, &chosen, sizeof chosen);
    squares = fused(level, level, squares);
    products = fused(level, size, products);
  }
  return {total(squares), total(products)};
}

void turbo_encode(const TurboCode& code, const Vectors& from, uint8_t* bytes, uint16_t* lengths) {
  alignas(64) float x[kLargestVector];
  alignas(64) int32_t found[kLargestVector];
  const int size = code.size;
  for (size_t row = 0; row < from.count; row++) {
    widen(from, row, size, x);
    const float squares = total_of(size, [&](auto sum, auto load) { return fused(load(x), load(x), sum); });
    for (int i = 0; i < size; i++) x[i] *= code.signs[i];
    transform(x, size);
    const float length = std::sqrt(squares), scale = 1.0f / std::max(length, 1e-30f);
    const Sums sums = code.bits == 4   ? choose<4>(code, x, scale, found)
                      : code.bits == 3 ? choose<3>(code, x, scale, found)
                      : code.bits == 2 ? choose<2>(code, x, scale, found)
                                       : choose<1>(code, x, scale, found);
    pack_all(found, size, code.bits, bytes + row * (size * code.bits / 8));
    const float spread = length / std::sqrt(static_cast<float>(size));
    lengths[row] = brain_of(code.keeps_length ? length / std::sqrt(sums.square) : spread * sums.product / sums.square);
  }
}

// Each code's level times a factor.
void look_up(const TurboCode& code, const int32_t* found, float factor, float* x) {
  alignas(64) float levels[16] = {};
  for (int level = 0; level < 1 << code.bits; level++) levels[level] = code.levels[level] * factor;
#if defined(__AVX512F__)
  const __m512 table = _mm512_load_ps(levels);
  for (int i = 0; i < code.size; i += 16)
    _mm512_store_ps(x + i, _mm512_permutexvar_ps(_mm512_load_si512(found + i), table));
#elif defined(__AVX2__)
  const __m256 low = _mm256_load_ps(levels), high = _mm256_load_ps(levels + 8);
  for (int i = 0; i < code.size; i += 8) {
    const __m256i at = _mm256_load_si256(reinterpret_cast<const __m256i*>(found + i));
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));  // its sign says which half
    _mm256_store_ps(x + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at), upper));
  }
#else
  for (int i = 0; i < code.size; i++) x[i] = levels[found[i]];
#endif
}

void turbo_decode(const TurboCode& code, const uint8_t* bytes, const uint16_t* lengths, const Vectors& to) {
  alignas(64) float x[kLargestVector];
  alignas(64) int32_t found[kLargestVector];
  const int size = code.size;
  const float even = 1.0f / std::sqrt(static_cast<float>(size));
  for (size_t row = 0; row < to.count; row++) {
    unpack_all(bytes + row * (size * code.bits / 8), size, code.bits, found);
    look_up(code, found, value(Brain{lengths[row]}) * even, x);
    transform(x, size);
    for (int i = 0; i < size; i++) x[i] *= code.signs[i];
    narrow(x, size, to, row);
  }
}

constexpr float kSlack = 1.0f / 128;
constexpr float kRounding = 12582912.0f;  // so large that its last bit is worth one

// The least and the largest of some numbers.
inline std::pair<float, float> bounds(const float* x, int size) {
  float low = x[0], high = x[0];
  int i = 0;
  if (size >= kVector) {
    Vec lows = loaded<Vec>(x), highs = lows;
    for (i = kVector; i + kVector <= size; i += kVector) {
      const Vec v = loaded<Vec>(x + i);
      lows = v < lows ? v : lows;
      highs = v > highs ? v : highs;
    }
    for (int lane = 0; lane < kVector; lane++) low = std::min(low, lows[lane]), high = std::max(high, highs[lane]);
  }
  for (; i < size; i++) low = std::min(low, x[i]), high = std::max(high, x[i]);
  return {low, high};
}

void affine_group(const float* x, int size, float last, uint16_t& step, uint16_t& least, int32_t* found) {
  const auto [low, high] = bounds(x, size);
  least = brain_of(low - std::fabs(low) * kSlack);
  const float from = value(Brain{least});
  step = brain_of((high - from) * ((1 + kSlack) / last));
  if (!(value(Brain{step}) > 0)) step = brain_of(1.0f);
  const float factor = 1.0f / value(Brain{step});
  int i = 0;
  for (; i + kVector <= size; i += kVector) {
    Vec counted = (loaded<Vec>(x + i) - from) * factor;
    counted = counted > 0.0f ? counted : Vec{};
    counted = counted < last ? counted : Vec{} + last;
    const IntegerVec whole = std::bit_cast<IntegerVec>(counted + kRounding) - std::bit_cast<int32_t>(kRounding);
    std::memcpy(found + i, &whole, sizeof whole);
  }
  for (; i < size; i++) {
    const float counted = std::min(std::max((x[i] - from) * factor, 0.0f), last) + kRounding;
    found[i] = std::bit_cast<int32_t>(counted) - std::bit_cast<int32_t>(kRounding);
  }
}

void affine_encode(const AffineCode& code, const Vectors& from, uint8_t* bytes, uint16_t* scales) {
  alignas(64) float x[kLargestVector];
  alignas(64) int32_t found[kLargestVector];
  const int groups = code.size / code.group;
  for (size_t row = 0; row < from.count; row++) {
    widen(from, row, code.size, x);
    uint16_t* own = scales + row * 2 * groups;
    for (int group = 0; group < groups; group++)
      affine_group(x + group * code.group, code.group, static_cast<float>((1 << code.bits) - 1), own[group], own[groups + group],
                   found + group * code.group);
    uint8_t* to = bytes + row * (code.size * code.bits / 8);
    pack(found, code.size, code.bits, 0, to);
  }
}

void affine_decode(const AffineCode& code, const uint8_t* bytes, const uint16_t* scales, const Vectors& to) {
  alignas(64) float x[kLargestVector];
  alignas(64) int32_t found[kLargestVector];
  const int groups = code.size / code.group;
  for (size_t row = 0; row < to.count; row++) {
    const uint8_t* from = bytes + row * (code.size * code.bits / 8);
    unpack<true>(from, code.size, code.bits, 0, found);
    const uint16_t* own = scales + row * 2 * groups;
    for (int group = 0; group < groups; group++) {
      const float step = value(Brain{own[group]}), least = value(Brain{own[groups + group]});
      const int at = group * code.group;
      for (int i = 0; i < code.group; i++) x[at + i] = static_cast<float>(found[at + i]) * step + least;
    }
    narrow(x, code.size, to, row);
  }
}

}  // namespace

extern const Codes INGOT_NAME(codes);
const Codes INGOT_NAME(codes) = {turbo_encode, turbo_decode, affine_encode, affine_decode};

}  // namespace ingot
