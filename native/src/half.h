// Numbers of 16 bits: a sign, 5 bits of exponent, 10 of fraction.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace ingot {

struct Half {
  uint16_t bits;
};

constexpr float kLargestHalf = 65504;
constexpr uint16_t kInfiniteHalf = 0x7c00;  // bits, from which on there are no numbers

static inline float value(float number) { return number; }

static inline float value(Half half) {
  // Moved to where a float has them, exponent and fraction lack only the difference of the two biases, which a product
  // supplies, also to the smallest numbers.
  const uint32_t magnitude = static_cast<uint32_t>(half.bits & 0x7fff) << 13, sign = static_cast<uint32_t>(half.bits & 0x8000) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f) | sign);
}

// The nearest one; the largest for what is larger.
static inline Half half_of(float number) {
  constexpr uint32_t kInfinity = 0x7f800000, kSmallest = 0x38800000;  // of floats; the smallest half that is not denormal
  const uint32_t bits = std::bit_cast<uint32_t>(number), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  auto signed_half = [sign](uint32_t magnitude) { return Half{static_cast<uint16_t>(sign | magnitude)}; };
  if (size > kInfinity) return signed_half(0x7e00);
  // Added to a half, a number is rounded to what the last bit of the smallest halves is worth.
  if (size < kSmallest)
    return signed_half(std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - std::bit_cast<uint32_t>(0.5f));
  const uint32_t bound = std::min(size, std::bit_cast<uint32_t>(kLargestHalf));
  return signed_half((bound + 0xfff + (bound >> 13 & 1) - (112u << 23)) >> 13);
}

}  // namespace ingot
