// What vectors are encoded around.
#pragma once

#include "folded.h"
#include "numbers.h"

namespace ingot {
namespace {  // each instruction set has its own

constexpr uint16_t kSign = 0x8000;  // of a scale

// A centre, or the other one, where there is one.
struct Centres {
  const float *centre, *other;

  // That of a vector whose scale was kept.
  const float* of(uint16_t scale) const { return scale & kSign ? other : centre; }
};

inline Centres centres_of(const Vectors& vectors) {
  alignas(64) static const float kNone[kLargestVector] = {};
  const float* centre = vectors.centre == nullptr ? kNone : vectors.centre;
  return {centre, vectors.other == nullptr ? centre : vectors.other};
}

struct Taken {
  float squares;  // of the vector around its centre
  uint16_t sign;  // that of the other centre, if that was nearer
};

// keep(vector around `centre`, where), and its squares; those around `other`, too, where there are two.
template <bool Two, class N, class Keep>
INGOT_INLINE inline std::pair<float, float> taken_off(const N* from, const float* centre, const float* other, int size,
                                                      const Keep& keep) {
  Vec squares = {}, others = {};
  float rest = 0, other_rest = 0;
  int i = 0;
  for (; i + kVector <= size; i += kVector) {
    const Vec v = loaded<Vec>(from + i), one = v - loaded<Vec>(centre + i);
    squares = fused(one, one, squares);
    keep(one, i);
    if constexpr (Two) {
      const Vec two = v - loaded<Vec>(other + i);
      others = fused(two, two, others);
    }
  }
  for (; i < size; i++) {
    const float v = value(from[i]), one = v - centre[i], two = v - other[i];
    rest = fused(one, one, rest), other_rest = fused(two, two, other_rest);
    keep(one, i);
  }
  return {sum(squares) + rest, sum(others) + other_rest};
}

// A vector around the nearer of its centres.
template <class N, class Keep>
INGOT_INLINE inline Taken around_nearer(const N* from, const Centres& centres, int size, const Keep& keep) {
  if (centres.other == centres.centre) return {taken_off<false>(from, centres.centre, centres.centre, size, keep).first, 0};
  const auto [squares, others] = taken_off<true>(from, centres.centre, centres.other, size, keep);
  if (!(others < squares)) return {squares, 0};
  return {taken_off<false>(from, centres.other, centres.other, size, keep).first, kSign};
}

}  // namespace
}  // namespace ingot
