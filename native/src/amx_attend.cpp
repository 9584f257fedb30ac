// Attention of many rows in register tiles: queries, keys, values and weights are rounded to bfloat16; scores and sums
// are float32. Scores are powers of two, not of e.
#include <algorithm>
#include <cmath>
#include <limits>

#include "amx.h"
#include "room.h"
#include "turn.h"

namespace ingot {
namespace {

constexpr int kKeys = 128;                      // whose scores exist at once
constexpr int kKeyBlocks = kKeys / kBlock;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Some of 16 numbers; the others are nought.
inline __m512 some(__mmask16 wanted, const float* from) { return _mm512_maskz_loadu_ps(wanted, from); }
inline __m512 some(__mmask16 wanted, const Half* from) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(wanted, from)); }

// 32 values of a row of `dim`, from `d` on, as bfloat16; nought beyond its end.
template <class Number>
inline __m512i values(const Number* row, int d, int dim) {
  return rounded(some(lanes(dim - d), row + d), some(lanes(dim - d - kTile), row + d + kTile));
}

inline __m512 capped(__m512 score, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  const __m512 e = power_of_two(_mm512_mul_ps(score, _mm512_set1_ps(2 * kLog2e / cap)));
  const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one)));
  return _mm512_mul_ps(tanh, _mm512_set1_ps(cap * kLog2e));
}

// The rows of a task, queries times the heads that share keys, while blocks of keys pass by. Two register tiles of them
// are a pair.
class Rows {
 public:
  Rows(const Sight& how, int queries, int group, int keys)
      : how_(how), rows_(queries * group), group_(group), before_(keys - queries), tiles_((rows_ + kTile - 1) / kTile),
        depth_((how.dim + kBlock - 1) / kBlock), width_((how.dim + kTile - 1) / kTile), sums_of_pair_((width_ + 1) / 2 * 4 * kTileSums) {
    const size_t pairs = (tiles_ + 1) / 2;
    q_ = numbers_.at_least((tiles_ + kKeys / kTile) * depth_ * kTileNumbers + (width_ + 2) * kKeyBlocks * kTileNumbers);
    k_ = q_ + tiles_ * depth_ * kTileNumbers;
    v_ = k_ + kKeys / kTile * depth_ * kTileNumbers;
    weights_ = v_ + width_ * kKeyBlocks * kTileNumbers;
    sums_ = floats_.at_least(pairs * sums_of_pair_ + kKeyBlocks * 4 * kTileSums + static_cast<size_t>(rows_) * (kTile + 1));
    scores_ = sums_ + pairs * sums_of_pair_;
    totals_ = scores_ + kKeyBlocks * 4 * kTileSums;
    largest_ = totals_ + static_cast<size_t>(rows_) * kTile;
  }

  void begin(const float* q, size_t stride, const float* sinks) {
    const __m512 scale = _mm512_set1_ps(how_.cap > 0 ? how_.scale : how_.scale * kLog2e);
    for (int row = 0; row < rows_; row++) {
      const float* from = q + row / group_ * stride + static_cast<size_t>(row % group_) * how_.dim;
      uint16_t* to = q_ + static_cast<size_t>(row / kTile) * depth_ * kTileNumbers + row % kTile * kBlock;
      for (int d = 0; d < how_.dim; d += kBlock, to += kTileNumbers) {
        const __m512 first = _mm512_maskz_loadu_ps(lanes(how_.dim - d), from + d);
        const __m512 second = _mm512_maskz_loadu_ps(lanes(how_.dim - d - kTile), from + d + kTile);
        _mm512_storeu_si512(to, rounded(_mm512_mul_ps(first, scale), _mm512_mul_ps(second, scale)));
      }
      largest_[row] = sinks ? sinks[row % group_] * kLog2e : kNothing;
      _mm512_storeu_ps(totals_ + row * kTile, _mm512_maskz_mov_ps(sinks ? 1 : 0, _mm512_set1_ps(1.0f)));
    }
  }

  // `count` keys, the first of which is the `base`th; whether none came before.
  template <class Number>
  void meet(const Paged<Number>& paged, int base, int count, bool anew) {
    size_t at[kKeys];  // they may lie in several pages
    for (int key = 0; key < count; key++) at[key] = paged.at(base + key);
    take_keys(paged.keys, at, count);
    take_values(paged.values, at, count);
    for (int tile = 0; tile < tiles_; tile += 2) {
      const int first = tile * kTile, last = std::min(first + 2 * kTile, rows_) - 1;
      const int end = std::min(count, sees_until(last) - base), begin = std::max(0, sees_from(first) - base);
      if (end <= begin) {
        // Nothing yet, where the first block of keys is before the window: sums must begin somewhere.
        if (anew) std::fill(sums_ + tile / 2 * sums_of_pair_, sums_ + (tile / 2 + 1) * sums_of_pair_, 0.0f);
        continue;
      }
      meet_pair(tile, base, begin / kBlock, (end + kBlock - 1) / kBlock, count, anew);
    }
  }

  void give(size_t stride, float* out) const {
    for (int row = 0; row < rows_; row++) {
      float* to = out + row / group_ * stride + static_cast<size_t>(row % group_) * how_.dim;
      const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_loadu_ps(totals_ + row * kTile)));
      for (int d = 0; d < width_; d++)
        _mm512_mask_storeu_ps(to + d * kTile, lanes(how_.dim - d * kTile), _mm512_mul_ps(_mm512_load_ps(sum(row, d)), inverse));
    }
  }

 private:
  int sees_until(int row) const { return before_ + row / group_ + 1; }
  int sees_from(int row) const { return how_.window > 0 ? std::max(0, sees_until(row) - how_.window) : 0; }

  // 16 sums of a row, of the values from 16 d on.
  float* sum(int row, int d) const {
    const int tile = row / kTile;
    return sums_ + tile / 2 * sums_of_pair_ + (d / 2 * 4 + tile % 2 * 2 + d % 2) * kTileSums + row % kTile * kTile;
  }

  // As the right factor of scores: of each 16 keys two values side by side, then the next two.
  template <class Number>
  void take_keys(const Number* k, const size_t* at, int count) {
    for (int key = 0; key < count; key += kTile)
      for (int block = 0; block < depth_; block++) {
        __m512i r[kTile];
        for (int i = 0; i < kTile; i++)
          r[i] = key + i < count ? values(k + at[key + i], block * kBlock, how_.dim) : _mm512_setzero_si512();
        turn(r);
        uint16_t* to = k_ + (static_cast<size_t>(key / kTile) * depth_ + block) * kTileNumbers;
        for (int i = 0; i < kTile; i++) _mm512_store_si512(to + i * kBlock, r[i]);
      }
    // Scores are computed of each two tiles of keys.
    if (const int tiles = (count + kTile - 1) / kTile; tiles % 2 != 0)
      std::fill_n(k_ + static_cast<size_t>(tiles) * depth_ * kTileNumbers, depth_ * kTileNumbers, 0);
  }

  // As the right factor of sums: of each 16 values those of two keys side by side, then those of the next two.
  template <class Number>
  void take_values(const Number* v, const size_t* at, int count) {
    const int whole = (count + kBlock - 1) / kBlock * kBlock;
    for (int key = 0; key < whole; key += 2)
      for (int d = 0; d < width_; d++) {
        auto of = [&](int key) {
          return key < count ? some(lanes(how_.dim - d * kTile), v + at[key] + d * kTile) : _mm512_setzero_ps();
        };
        _mm512_store_si512(v_ + (d * kKeyBlocks + key / kBlock) * kTileNumbers + key % kBlock * kTile, paired(of(key), of(key + 1)));
      }
  }

  // Two tiles of rows with the blocks of keys [begin, end).
  void meet_pair(int tile, int base, int begin, int end, int count, bool anew) {
    const size_t deep = static_cast<size_t>(depth_) * kTileNumbers, across = static_cast<size_t>(kKeyBlocks) * kTileNumbers;
    const bool two = tile + 1 < tiles_;
    for (int block = begin; block < end; block++)
      add_products(two, true, q_ + tile * deep, deep, k_ + 2 * block * deep, deep, depth_, true, scores_ + block * 4 * kTileSums);
    for (int row = tile * kTile; row < std::min((tile + 2) * kTile, rows_); row++)
      weigh(row, begin, end, std::max(0, sees_from(row) - base), std::min(count, sees_until(row) - base), anew);
    for (int d = 0; d < width_; d += 2)
      add_products(two, width_ - d > 1, weights_ + begin * kTileNumbers, across, v_ + d * across + begin * kTileNumbers, across,
                   end - begin, anew, sums_ + tile / 2 * sums_of_pair_ + d * 2 * kTileSums);
  }

  // A row's scores of the blocks of keys [begin, end) become weights, where it sees the keys [from, until).
  void weigh(int row, int begin, int end, int from, int until, bool anew) {
    float* scores = scores_ + row / kTile % 2 * 2 * kTileSums + row % kTile * kTile;
    uint16_t* weights = weights_ + static_cast<size_t>(row / kTile % 2) * kKeyBlocks * kTileNumbers + row % kTile * kBlock;
    if (until <= from) {
      for (int block = begin; block < end; block++) _mm512_store_si512(weights + block * kTileNumbers, _mm512_setzero_si512());
      return;
    }
    auto at = [scores](int sixteen) { return scores + (sixteen / 2 * 4 + sixteen % 2) * kTileSums; };
    if (how_.cap > 0)
      for (int i = 2 * begin; i < 2 * end; i++) _mm512_store_ps(at(i), capped(_mm512_load_ps(at(i)), how_.cap));
    auto hide = [&](int i) {
      const __mmask16 seen = lanes(until - i * kTile) & ~lanes(from - i * kTile);
      _mm512_store_ps(at(i), _mm512_mask_mov_ps(_mm512_set1_ps(kNothing), seen, _mm512_load_ps(at(i))));
    };
    for (int i = 2 * begin; i * kTile < from; i++) hide(i);
    for (int i = until / kTile; i < 2 * end; i++) hide(i);

    __m512 most = _mm512_set1_ps(largest_[row]);
    for (int i = 2 * begin; i < 2 * end; i++) most = _mm512_max_ps(most, _mm512_load_ps(at(i)));
    const float before = largest_[row], now = _mm512_reduce_max_ps(most);
    const __m512 top = _mm512_set1_ps(now);
    __m512 total = _mm512_load_ps(totals_ + row * kTile);
    if (now != before) {
      const __m512 worth = power_of_two(_mm512_set1_ps(before - now));
      total = _mm512_mul_ps(total, worth);
      largest_[row] = now;
      if (!anew)
        for (int d = 0; d < width_; d++) _mm512_store_ps(sum(row, d), _mm512_mul_ps(_mm512_load_ps(sum(row, d)), worth));
    }
    for (int block = begin; block < end; block++) {
      const __m512 first = power_of_two(_mm512_sub_ps(_mm512_load_ps(at(2 * block)), top));
      const __m512 second = power_of_two(_mm512_sub_ps(_mm512_load_ps(at(2 * block + 1)), top));
      total = _mm512_add_ps(total, _mm512_add_ps(first, second));
      _mm512_store_si512(weights + block * kTileNumbers, rounded(first, second));
    }
    _mm512_store_ps(totals_ + row * kTile, total);
  }

  static thread_local Room<uint16_t> numbers_;
  static thread_local Room<float> floats_;

  const Sight how_;
  const int rows_, group_;
  const int before_;  // keys that all queries see, if there is no window
  const int tiles_;
  const int depth_, width_;    // register tiles that a row's values fill as a factor and as sums
  const size_t sums_of_pair_;
  uint16_t *q_, *k_, *v_, *weights_;
  float *sums_, *scores_, *totals_, *largest_;
};

thread_local Room<uint16_t> Rows::numbers_;
thread_local Room<float> Rows::floats_;

}  // namespace

template <class Number>
void attend_in_tiles(const Sight& how, const float* q, int queries, int group, size_t stride, const Paged<Number>& paged,
                     int keys, const float* sinks, float* out) {
  const Tiles tiles;
  Rows rows(how, queries, group, keys);
  rows.begin(q, stride, sinks);
  const int oldest = how.window > 0 ? std::max(0, keys - queries + 1 - how.window) : 0;
  for (int base = oldest; base < keys; base += kKeys)
    rows.meet(paged, base, std::min(kKeys, keys - base), base == oldest);
  rows.give(stride, out);
}

template void attend_in_tiles(const Sight&, const float*, int, int, size_t, const Paged<float>&, int, const float*, float*);
template void attend_in_tiles(const Sight&, const float*, int, int, size_t, const Paged<Half>&, int, const float*, float*);

}  // namespace ingot
