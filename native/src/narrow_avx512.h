// Numbers of 16 bits as integers, each vector with a step of its own: products of pairs are summed exactly.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "floats.h"
#include "turn.h"
#include "vectors.h"

namespace ingot {
namespace {

struct Narrow {
  using Number = int16_t;

  // So large that sums of kDepth products, and of a block's weights and values, still fit in 32 bits.
  static constexpr float kLargest = 4095, kLargestWeight = 8191;
  static constexpr int kDepth = 128;
  // As far as scores may be off, estimated from the lengths of query and keys as if every dim were off by a whole step. They
  // are usually off by less than a tenth of that.
  static constexpr float kReach = 1.0f / 8;

  // Whether keys and values, of which these are the largest, can be taken.
  static bool holds(Half key, Half value) { return key.bits < kInfiniteHalf && value.bits < kInfiniteHalf; }

  // `q` has zeros behind its end.
  static void put_query(const float* q, int row, NarrowTile& tile) {
    float largest = 0, squares = 0;
    for (int d = 0; d < tile.dims; d++) {
      largest = std::max(largest, std::abs(q[d]));
      squares += q[d] * q[d];
    }
    tile.steps[row] = largest / kLargest;
    tile.reach[row] = (std::sqrt(squares) + std::sqrt(static_cast<float>(tile.dims)) * largest) / kLargest;
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? kLargest / largest : 0.0f);
    for (int d = 0; d < tile.dims; d += 32)
      _mm512_storeu_si512(NarrowTile::as<Number>(tile.q) + static_cast<size_t>(row) * tile.dims + d,
                          rounded(_mm512_loadu_ps(q + d), _mm512_loadu_ps(q + d + 16), inverse));
  }

  // Takes a block of keys and values. Gives how far scores may be off, for a row whose reach is one.
  static float put_block(const Half* k, const Half* v, int dim, NarrowTile& tile) {
    const float largest = put_keys(k, dim, tile);
    put_values(v, dim, tile);
    return largest;
  }

  // Scores of R rows, without what is common to all keys of the block.
  template <int R>
  static void scores(const NarrowTile& tile, int row, float* out) {
    const Number* keys = NarrowTile::as<Number>(tile.keys);
    const Number* q = NarrowTile::as<Number>(tile.q) + static_cast<size_t>(row) * tile.dims;
    for (int d = 0; d < tile.dims; d += kDepth)
      products<R, 4>(q + d, tile.dims, keys + d * kKeyBlock, 2 * kKeyBlock, std::min(kDepth, tile.dims - d) / 2,
                     [&](int a, int b, __m512 sums) INGOT_INLINE {
        float* to = out + a * kKeyBlock + b * 16;
        const __m512 steps = _mm512_mul_ps(_mm512_set1_ps(tile.steps[row + a]), _mm512_loadu_ps(tile.key_steps + b * 16));
        _mm512_storeu_ps(to, d == 0 ? _mm512_mul_ps(sums, steps) : _mm512_fmadd_ps(sums, steps, _mm512_loadu_ps(to)));
      });
  }

  // Weights of two vectors of keys, the first of which is `key`.
  static void put_weights(Vec first, Vec second, int key, const NarrowTile& tile, Number* to) {
    const __m512 one = _mm512_mul_ps((__m512)first, _mm512_loadu_ps(tile.value_shares + key));
    const __m512 two = _mm512_mul_ps((__m512)second, _mm512_loadu_ps(tile.value_shares + key + 16));
    _mm512_storeu_si512(to, _mm512_packs_epi32(_mm512_cvtps_epi32(one), _mm512_cvtps_epi32(two)));
  }

  // sums = sums * before + weights . values * now, for R rows.
  template <int R>
  static void sum_up(const NarrowTile& tile, const Number* weights, const Half*, int dim, const float* before, const float* now,
                     float* sums) {
    int d = 0;
    for (; d + 64 <= dim; d += 64) some_sums<R, 4>(tile, weights, d, dim, before, now, sums);
    for (; d < dim; d += 16) some_sums<R, 1>(tile, weights, d, dim, before, now, sums);
  }

 private:
  static __m512i rounded(__m512 first, __m512 second, __m512 inverse) {
    return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(first, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(second, inverse)));
  }

  // Said in assembly: gcc copies the sums to other registers and back around the intrinsic.
  INGOT_INLINE static inline void add_pairs(__m512i& sum, __m512i pairs, __m512i both) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(both));
  }

  // Pairs of each of R rows `across` apart with the same pairs of W vectors, which lie `stride` apart: give(row, vector, sums).
  template <int R, int W, class Give>
  INGOT_INLINE static inline void products(const Number* rows, size_t across, const Number* pairs, size_t stride, int count, const Give& give) {
    __m512i sums[R][W];
    repeated<R * W>([&](auto i) INGOT_INLINE { sums[i / W][i % W] = _mm512_setzero_si512(); });
    for (int i = 0; i < count; i++, rows += 2, pairs += stride) {
      __m512i columns[W];
      repeated<W>([&](auto b) INGOT_INLINE { columns[b] = _mm512_loadu_si512(pairs + b * 32); });
      repeated<R>([&](auto a) INGOT_INLINE {
        int32_t pair;
        __builtin_memcpy(&pair, rows + a * across, sizeof pair);
        const __m512i both = _mm512_set1_epi32(pair);
        repeated<W>([&](auto b) INGOT_INLINE { add_pairs(sums[a][b], columns[b], both); });
      });
    }
    repeated<R * W>([&](auto i) INGOT_INLINE { give(i / W, i % W, _mm512_cvtepi32_ps(sums[i / W][i % W])); });
  }

  template <int R, int W>
  static void some_sums(const NarrowTile& tile, const Number* weights, int d, int dim, const float* before, const float* now, float* sums) {
    products<R, W>(weights, kKeyBlock, NarrowTile::as<Number>(tile.values) + 2 * d, 2 * static_cast<size_t>(dim), kKeyBlock / 2,
                   [&](int a, int b, __m512 found) INGOT_INLINE {
      float* at = sums + static_cast<size_t>(a) * dim + d + b * 16;
      const __m512 rest = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(before[a]));
      _mm512_storeu_ps(at, _mm512_fmadd_ps(found, _mm512_set1_ps(now[a] * tile.value_step), rest));
    });
  }

  static __m512 widened(const Half* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

  // What `of` gives for each 16 dims, the largest magnitude.
  template <class Of>
  static float largest_of(int dim, const Of& of) {
    __m512 largest = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) largest = _mm512_max_ps(largest, _mm512_abs_ps(of(d)));
    return _mm512_reduce_max_ps(largest);
  }

  // Pairs of dims of all keys, one pair after another. Gives the largest number that there was.
  static float put_keys(const Half* k, int dim, NarrowTile& tile) {
    Number* to = NarrowTile::as<Number>(tile.keys);
    float largest = 0;
    for (int first = 0; first < kKeyBlock; first += 16) {
      float inverses[16];
      auto rest = [&](int i, int d) {
        if (d >= dim) return _mm512_setzero_ps();
        return _mm512_sub_ps(widened(k + static_cast<size_t>(first + i) * dim + d), _mm512_loadu_ps(tile.centre + d));
      };
      for (int i = 0; i < 16; i++) {
        const float own = largest_of(dim, [&](int d) { return rest(i, d); });
        largest = std::max(largest, own);
        tile.key_steps[first + i] = own / kLargest;
        inverses[i] = own > 0 ? kLargest / own : 0.0f;
      }
      for (int d = 0; d < tile.dims; d += 32) {
        __m512i pairs[16];
        for (int i = 0; i < 16; i++) pairs[i] = rounded(rest(i, d), rest(i, d + 16), _mm512_set1_ps(inverses[i]));
        turn(pairs);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (d / 2 + i) * 2 * kKeyBlock + 2 * first, pairs[i]);
      }
    }
    return largest;
  }

  // Pairs of keys, in the order that put_weights leaves them in, of all dims.
  static void put_values(const Half* v, int dim, NarrowTile& tile) {
    float inverses[kKeyBlock], most = 0;
    for (int key = 0; key < kKeyBlock; key++) {
      const float own = largest_of(dim, [&](int d) { return widened(v + static_cast<size_t>(key) * dim + d); });
      most = std::max(most, own);
      tile.value_shares[key] = own;
      inverses[key] = own > 0 ? kLargest / own : 0.0f;
    }
    for (int key = 0; key < kKeyBlock; key++) tile.value_shares[key] *= most > 0 ? kLargestWeight / most : 0.0f;
    tile.value_step = most / (kLargest * kLargestWeight);
    Number* to = NarrowTile::as<Number>(tile.values);
    for (int pair = 0; pair < kKeyBlock / 2; pair++) {
      const int key = pair / 16 * 32 + pair % 4 / 2 * 16 + pair % 16 / 4 * 4 + pair % 2 * 2;
      for (int d = 0; d < dim; d += 16, to += 32) {
        auto of = [&](int key) { return _mm512_cvtps_epi32(_mm512_mul_ps(widened(v + static_cast<size_t>(key) * dim + d), _mm512_set1_ps(inverses[key]))); };
        _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaa, of(key), _mm512_slli_epi32(of(key + 1), 16)));
      }
    }
  }
};

}  // namespace
}  // namespace ingot
