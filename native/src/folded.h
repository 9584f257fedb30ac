// What a vector's lanes come to, in registers.
#pragma once

#include "vectors.h"

namespace ingot {
namespace {  // each instruction set has its own

// Two by two.
template <int Apart, class Join, int... I>
INGOT_INLINE inline float folded(Vec v, const Join& join, std::integer_sequence<int, I...> lanes) {
  v = join(v, Vec(__builtin_shufflevector(v, v, (I ^ Apart)...)));
  if constexpr (Apart > 1)
    return folded<Apart / 2>(v, join, lanes);
  else
    return v[0];
}

template <class Join>
INGOT_INLINE inline float folded(Vec v, const Join& join) {
  return folded<kVector / 2>(v, join, std::make_integer_sequence<int, kVector>{});
}

INGOT_INLINE inline float sum(Vec v) {
  return folded(v, [](Vec one, Vec other) { return one + other; });
}

}  // namespace
}  // namespace ingot
