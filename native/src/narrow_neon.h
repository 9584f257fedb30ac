// Numbers of 16 bits as halves. Products are summed as halves in runs of 16, two runs are added, and the rest is float32.
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <limits>

#include "floats.h"
#include "vectors.h"

namespace ingot {
namespace {

struct Narrow {
  using Number = float16_t;

  // The largest that a score, or any part of it, may be: of halves below this the last bit is worth 1/16. Most sums stay far
  // smaller, as a query would have to point where a key does.
  static constexpr float kReach = 128;

  // Whether keys and values, of which these are the largest, can be taken: sums of 32 values must not overflow, and the last
  // bits of small ones must be worth something.
  static bool holds(Half key, Half most) {
    return key.bits < kInfiniteHalf && value(most) <= kLargestHalf / kKeyBlock && value(most) >= 0x1p-8f;
  }

  // `q` has zeros behind its end.
  static void put_query(const float* q, int row, NarrowTile& tile) {
    Number* to = NarrowTile::as<Number>(tile.q) + static_cast<size_t>(row) * tile.dims;
    float squares = 0;
    for (int d = 0; d < tile.dim; d++) squares = fused(q[d], q[d], squares);
    for (int d = 0; d < tile.dim; d += 8) vst1q_f16(to + d, halved(vld1q_f32(q + d), vld1q_f32(q + d + 4)));
    const float length = std::sqrt(squares);
    tile.reach[row] = length <= kLargestHalf ? length : std::numeric_limits<float>::infinity();
  }

  // Takes a block of keys; values are read where they are. Gives the length of the longest key, than which no sum is larger
  // for a query whose length is one.
  static float put_block(const Half* k, const Half*, int dim, NarrowTile& tile) {
    float longest = 0;
    for (int first = 0; first < kKeyBlock; first += 8) {
      float32x4_t squares[8] = {};
      // Each 16 keys are a panel: of all of them one dim after another.
      Number* to = NarrowTile::as<Number>(tile.keys) + static_cast<size_t>(first / kPanelKeys) * kPanelKeys * dim + first % kPanelKeys;
      for (int d = 0; d < dim; d += 8) {
        float16x8_t keys[8];
        repeated<8>([&](auto i) INGOT_INLINE {
          const float16x8_t key = vreinterpretq_f16_u16(vld1q_u16(&k[static_cast<size_t>(first + i) * dim + d].bits));
          const float32x4_t low = vsubq_f32(vcvt_f32_f16(vget_low_f16(key)), vld1q_f32(tile.centre + d));
          const float32x4_t high = vsubq_f32(vcvt_high_f32_f16(key), vld1q_f32(tile.centre + d + 4));
          squares[i] = vfmaq_f32(vfmaq_f32(squares[i], low, low), high, high);
          keys[i] = halved(low, high);
        });
        turn(keys);
        repeated<8>([&](auto i) INGOT_INLINE { vst1q_f16(to + static_cast<size_t>(d + i) * kPanelKeys, keys[i]); });
      }
      for (int i = 0; i < 8; i++) longest = std::max(longest, vaddvq_f32(squares[i]));
    }
    return std::sqrt(longest);
  }

  // Scores of R rows, without what is common to all keys of the block.
  template <int R>
  static void scores(const NarrowTile& tile, int row, float* out) {
    const Number* q = NarrowTile::as<Number>(tile.q) + static_cast<size_t>(row) * tile.dims;
    for (int key = 0; key < kKeyBlock; key += kPanelKeys) {
      const Number* panel = NarrowTile::as<Number>(tile.keys) + static_cast<size_t>(key) * tile.dim;
      for (int d = 0; d < tile.dim; d += 2 * kRun)
        products<R>(q + d, tile.dims, panel + static_cast<size_t>(d) * kPanelKeys, kPanelKeys, tile.dim - d > kRun,
                    [&](int a, int b, float32x4_t low, float32x4_t high) INGOT_INLINE {
          float* to = out + a * kKeyBlock + key + 8 * b;
          vst1q_f32(to, d == 0 ? low : vaddq_f32(vld1q_f32(to), low));
          vst1q_f32(to + 4, d == 0 ? high : vaddq_f32(vld1q_f32(to + 4), high));
        });
    }
  }

  // Weights of two vectors of keys.
  static void put_weights(Vec first, Vec second, int, const NarrowTile&, Number* to) {
    vst1q_f16(to, halved((float32x4_t)first, (float32x4_t)second));
  }

  // sums = sums * before + weights . values * now, for R rows.
  template <int R>
  static void sum_up(const NarrowTile&, const Number* weights, const Half* v, int dim, const float* before, const float* now,
                     float* sums) {
    for (int d = 0; d < dim; d += 16)
      for (int key = 0; key < kKeyBlock; key += 2 * kRun) {
        const Number* values = reinterpret_cast<const Number*>(v + static_cast<size_t>(key) * dim + d);
        products<R>(weights + key, kKeyBlock, values, dim, true, [&](int a, int b, float32x4_t low, float32x4_t high) INGOT_INLINE {
          float* at = sums + static_cast<size_t>(a) * dim + d + 8 * b;
          const float worth = key == 0 ? before[a] : 1.0f;
          vst1q_f32(at, vfmaq_n_f32(vmulq_n_f32(vld1q_f32(at), worth), low, now[a]));
          vst1q_f32(at + 4, vfmaq_n_f32(vmulq_n_f32(vld1q_f32(at + 4), worth), high, now[a]));
        });
      }
  }

 private:
  static constexpr int kPanelKeys = 16, kRun = 16;

  static float16x8_t halved(float32x4_t low, float32x4_t high) { return vcvt_high_f16_f32(vcvt_f16_f32(low), high); }

  // From rows of 8 lanes to columns.
  INGOT_INLINE static inline void turn(float16x8_t* r) {
    float16x8_t t[8];
    repeated<4>([&](auto i) INGOT_INLINE {
      t[2 * i] = vtrn1q_f16(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = vtrn2q_f16(r[2 * i], r[2 * i + 1]);
    });
    auto pairs = [](float16x8_t x) INGOT_INLINE { return vreinterpretq_f32_f16(x); };
    auto fours = [](float32x4_t x) INGOT_INLINE { return vreinterpretq_f64_f32(x); };
    float64x2_t f[8];
    // f[i] and f[i + 4] have the columns i and i + 4 of the rows 0 to 3 and 4 to 7.
    repeated<2>([&](auto i) INGOT_INLINE {
      repeated<2>([&](auto half) INGOT_INLINE {
        const auto a = pairs(t[4 * half + i]), b = pairs(t[4 * half + i + 2]);
        f[4 * half + i] = fours(vtrn1q_f32(a, b));
        f[4 * half + i + 2] = fours(vtrn2q_f32(a, b));
      });
    });
    repeated<4>([&](auto i) INGOT_INLINE {
      r[i] = vreinterpretq_f16_f64(vtrn1q_f64(f[i], f[i + 4]));
      r[i + 4] = vreinterpretq_f16_f64(vtrn2q_f64(f[i], f[i + 4]));
    });
  }

  // sum = sum + line * row[lane]; the first of a run is the product alone. Said in assembly: gcc makes a vector of the lane,
  // which takes as long as half of what it is good for.
  template <bool first, int lane>
  INGOT_INLINE static inline void add_lane(float16x8_t& sum, float16x8_t line, float16x8_t row) {
    if constexpr (first)
      asm volatile("fmul %0.8h, %1.8h, %2.h[%3]" : "=w"(sum) : "w"(line), "x"(row), "i"(lane));
    else
      asm volatile("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(line), "x"(row), "i"(lane));
  }

  // One run of R rows `across` apart with two vectors of each of as many lines, `stride` apart.
  template <int R>
  INGOT_INLINE static inline void run(const Number* rows, size_t across, const Number*& line, size_t stride, float16x8_t (&sums)[R][2]) {
    repeated<2>([&](auto half) INGOT_INLINE {
      float16x8_t own[R];
      repeated<R>([&](auto a) INGOT_INLINE { own[a] = vld1q_f16(rows + a * across + 8 * half); });
      repeated<8>([&](auto lane) INGOT_INLINE {
        const float16x8_t one = vld1q_f16(line), two = vld1q_f16(line + 8);
        // One step after another: as many addresses would not fit in registers.
        line += stride;
        asm volatile("" : "+r"(line));
        repeated<R>([&](auto a) INGOT_INLINE {
          add_lane<half == 0 && lane == 0, lane>(sums[a][0], one, own[a]);
          add_lane<half == 0 && lane == 0, lane>(sums[a][1], two, own[a]);
        });
      });
    });
  }

  // One run, or two: give(row, vector, sums of its first and its last four lanes).
  template <int R, class Give>
  INGOT_INLINE static inline void products(const Number* rows, size_t across, const Number* line, size_t stride, bool two, const Give& give) {
    float16x8_t sums[R][2];
    run<R>(rows, across, line, stride, sums);
    if (two) {
      float16x8_t others[R][2];
      run<R>(rows + kRun, across, line, stride, others);
      repeated<2 * R>([&](auto i) INGOT_INLINE { sums[i / 2][i % 2] = vaddq_f16(sums[i / 2][i % 2], others[i / 2][i % 2]); });
    }
    repeated<2 * R>([&](auto i) INGOT_INLINE {
      const float16x8_t sum = sums[i / 2][i % 2];
      give(i / 2, i % 2, vcvt_f32_f16(vget_low_f16(sum)), vcvt_high_f32_f16(sum));
    });
  }
};

}  // namespace
}  // namespace ingot
