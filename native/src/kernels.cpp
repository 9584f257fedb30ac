// Compiled several times with different flags; INGOT_ISA names the result.
#include "kernels.h"

#include "block.h"
#include "isa.h"
#include "round.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#define INGOT_TEXT(name) INGOT_TEXT_(name)
#define INGOT_TEXT_(name) #name

namespace ingot {
namespace {

// What is more than so many times the root of its row's mean square has a rest.
constexpr float kOutlier = 5;

// What is too small to be divided by.
constexpr float kNothing = 1e-30f;

constexpr int kAtOnce = 8;  // blocks whose largest numbers are looked for before they are rounded, as looking takes long

void quantise(const float* x, int columns, int group, int lot, int place, Quantised out) {
  const float mean = mean_square(x, columns), most = std::max(kOutlier * std::sqrt(mean), kNothing);
  // Infinities and what is no number make the mean so too, and then the sums.
  const float nothing = mean * 0.0f;
  const int blocks = columns / kBlock, per_group = group / kBlock;
  const size_t stride = 4 * static_cast<size_t>(lot);
  float* sum = out.sums + place;
  int left = per_group;  // blocks of the group
  *sum = nothing;
  for (int begin = 0; begin < blocks; begin += kAtOnce) {
    const int count = std::min(kAtOnce, blocks - begin);
    float largest[kAtOnce];
    Rounded rounded[kAtOnce];
    for (int i = 0; i < count; i++) largest[i] = largest_of(x + static_cast<size_t>(begin + i) * kBlock);
    for (int i = 0; i < count; i++) {
      const float* from = x + static_cast<size_t>(begin + i) * kBlock;
      const size_t at = static_cast<size_t>(begin + i) * lot, to = at * kBlock + 4 * place;
      const Steps values{out.values + to, stride}, rests{out.rests + to, stride};
      if (!(largest[i] > most))
        rounded[i] = round_block(from, largest[i], values);
      else if (const uint8_t marks = round_with_rests(from, largest[i], most, values, rests, rounded[i]); marks != 0)
        // Other rows of the lot may be rounded at the same time.
        std::atomic_ref(out.marks[at]).fetch_or(marks, std::memory_order_relaxed);
      out.scales[at + place] = rounded[i].scale;
    }
    for (int i = 0; i < count; i++, left--) {
      if (left == 0) {
        left = per_group;
        sum += lot;
        *sum = nothing;
      }
      *sum += rounded[i].scale * static_cast<float>(rounded[i].sum);
    }
  }
}

// The bias of each row of a tile, as the stored quanta need it.
template <int Bits, class Factor>
inline Sum bias_of(const Factor* biases, Sum scale) {
  return Bits == 8 && kSignedBytes ? plus(load(biases), scale, 128.0f) : load(biases);
}

// As many numbers of a tile as are wanted.
inline void keep(Sum sum, float* to, int wanted) {
  if (wanted >= kTile) {
    store(to, sum);
    return;
  }
  float all[kTile];
  store(all, sum);
  std::memcpy(to, all, sizeof(float) * wanted);
}

// Weights are waited for: they are asked for that many bytes ahead, beyond the end of a page too, where the processor itself
// stops looking ahead.
constexpr size_t kAhead = 2048;

// One tile of weights and the M activation rows of a lot, with the sums in registers over the whole width. What becomes of a
// row does not depend on M.
template <int M, int Bits, class Factor>
class Tile {
 public:
  Tile(const PackedMatrix& w, const Quantised& x, int n)
      : x_(x), blocks_(w.blocks()), groups_(w.groups()), per_group_(w.group / kBlock),
        quanta_(w.quanta + static_cast<size_t>(n / kTile) * blocks_ * kBytes),
        scales_(static_cast<const Factor*>(w.scales) + static_cast<size_t>(n) * groups_),
        biases_(static_cast<const Factor*>(w.biases) + static_cast<size_t>(n) * groups_) {}

  void multiply(Sum* sums) const {
#if defined(__ARM_FEATURE_DOTPROD)
    if constexpr (std::is_same_v<Factor, Half>)
      if (std::has_single_bit(static_cast<unsigned>(per_group_))) {
        alignas(16) float found[M * kTile];
        lot_products<M, Bits>(quanta_, scales_, biases_, per_group_, x_, blocks_, found);
        for (int m = 0; m < M; m++) sums[m] = load(found + m * kTile);
        return;
      }
#endif
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sums[m] = zero();
    const uint8_t* quanta = quanta_;
    for (int group = 0, block = 0; group < groups_; group++) {
      const Sum scale = load(scales_ + group * kTile);
      for (int end = block + per_group_; block < end; block++, quanta += kBytes) {
        for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(quanta + kAhead + line);
        add_block(quanta, static_cast<size_t>(block) * M, scale, sums);
      }
      const Sum bias = bias_of<Bits>(biases_ + group * kTile, scale);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums[m] = plus(sums[m], bias, x_.sums[group * M + m]);
    }
  }

 private:
  static constexpr size_t kBytes = kTile * kBlock * Bits / 8;  // of a block

  void add_block(const uint8_t* quanta, size_t at, Sum scale, Sum* sums) const {
    constexpr int kTogether = std::min(M, kMostTogether);
    const Block<Bits> weights(quanta);
#pragma GCC unroll 2
    for (int m = 0; m < M; m += kTogether) {
      Ints found[kTogether];
      weights.template products<M, kTogether>(x_.values + at * kBlock + 4 * m, found);
      for (unsigned marks = x_.marks[at]; marks != 0; marks &= marks - 1) {
        const int step = std::countr_zero(marks);
        Block<Bits>::template add_rests<M, kTogether>(quanta, step, x_.rests + at * kBlock + 4 * (step * M + m), found);
      }
      Sum numbers[kTogether];
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; i++) numbers[i] = scaled(found[i], scale);
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; i++) sums[m + i] = plus(sums[m + i], numbers[i], x_.scales[at + m + i]);
    }
  }

  const Quantised& x_;
  int blocks_, groups_, per_group_;
  const uint8_t* quanta_;
  const Factor *scales_, *biases_;
};

// As many lots of M rows as there are.
template <int M, int Bits, class Factor>
void lots(const PackedMatrix& w, Quantised& x, int& count, int first, int last, float*& y, size_t stride) {
  for (; count > 0 && lot_of(0, count).size == M; count -= M) {
    const int rows = std::min(M, count);
    for (int n = first; n < last; n += kTile) {
      Sum sums[M];
      Tile<M, Bits, Factor>(w, x, n).multiply(sums);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
        if (m < rows) keep(sums[m], y + m * stride + n, last - n);
    }
    const size_t blocks = static_cast<size_t>(M) * w.blocks();
    x.values += blocks * kBlock;
    x.rests += blocks * kBlock;
    x.scales += blocks;
    x.marks += blocks;
    x.sums += static_cast<size_t>(M) * w.groups();
    y += M * stride;
  }
}

template <int Bits, class Factor>
void multiply_as(const PackedMatrix& w, Quantised x, int count, int first, int last, float* y, size_t stride) {
  lots<kLot, Bits, Factor>(w, x, count, first, last, y, stride);
  lots<4, Bits, Factor>(w, x, count, first, last, y, stride);
  lots<2, Bits, Factor>(w, x, count, first, last, y, stride);
  lots<1, Bits, Factor>(w, x, count, first, last, y, stride);
}

void multiply(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride) {
  const auto use = w.bits == 4 ? (w.halves ? multiply_as<4, Half> : multiply_as<4, float>)
                               : (w.halves ? multiply_as<8, Half> : multiply_as<8, float>);
  use(w, x, count, first, last, y, stride);
}

template <int Bits, class Factor>
void unpack_row(const PackedMatrix& w, int n, float* out) {
  const int per_group = w.group / kBlock, groups = w.groups(), row = n % kTile;
  const size_t block_bytes = kTile * w.block_bytes(), factors = static_cast<size_t>(n / kTile) * groups * kTile + row;
  const uint8_t* p = w.quanta + static_cast<size_t>(n / kTile) * w.blocks() * block_bytes + 4 * row;
  for (int block = 0; block < w.blocks(); block++, p += block_bytes, out += kBlock) {
    const size_t factor = factors + static_cast<size_t>(block / per_group) * kTile;
    const float scale = value(static_cast<const Factor*>(w.scales)[factor]);
    const float bias = value(static_cast<const Factor*>(w.biases)[factor]);
    for (int k = 0; k < kBlock; k++) {
      const int step = k / 4, t = k % 4;
      int quantum;
      if constexpr (Bits == 4)
        quantum = p[4 * kTile * (step / 2) + t] >> (step % 2 * 4) & 15;
      else
        quantum = p[4 * kTile * step + t] ^ (kSignedBytes ? 128 : 0);
      out[k] = scale * static_cast<float>(quantum) + bias;
    }
  }
}

void unpack(const PackedMatrix& w, int first, int last, float* out) {
  const auto use = w.bits == 4 ? (w.halves ? unpack_row<4, Half> : unpack_row<4, float>)
                               : (w.halves ? unpack_row<8, Half> : unpack_row<8, float>);
  for (int n = first; n < last; n++, out += w.columns) use(w, n, out);
}

}  // namespace

extern const Kernels INGOT_NAME(kernels);
const Kernels INGOT_NAME(kernels) = {INGOT_TEXT(INGOT_ISA), kTile, kSignedBytes, quantise, multiply, unpack};

}  // namespace ingot
