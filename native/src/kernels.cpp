// Compiled several times with different flags; INGOT_ISA names the result.
#include "kernels.h"

#include "block.h"
#include "isa.h"
#include "round.h"
#include "super_tile.h"
#include "tile.h"

#include <algorithm>
#include <atomic>
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
  float *sum = out.sums + place, *halves = out.halves + place;
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
    for (int i = 0; i < count; i++, left--, halves += 2 * lot) {
      if (left == 0) {
        left = per_group;
        sum += lot;
        *sum = nothing;
      }
      *sum += rounded[i].scale * static_cast<float>(rounded[i].sum());
      for (int half = 0; half < 2; half++)
        halves[half * lot] = rounded[i].scale * static_cast<float>(rounded[i].halves[half]) + nothing;
    }
  }
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
    x.halves += 2 * blocks;
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

// use(bits, factors) with the form of the weights as constants.
template <class Use>
void as_constants(const PackedMatrix& w, const Use& use) {
  auto factors = [&]<int Bits>(std::integral_constant<int, Bits> bits) {
    if (w.factors == Factors::halves) return use(bits, Half{});
    if (w.factors == Factors::floats) return use(bits, 0.0f);
    if constexpr (Bits != 8) return use(bits, Super{});
  };
  switch (w.bits) {
    case 2: return factors(std::integral_constant<int, 2>{});
    case 3: return factors(std::integral_constant<int, 3>{});
    case 4: return factors(std::integral_constant<int, 4>{});
    case 5: return factors(std::integral_constant<int, 5>{});
    case 6: return factors(std::integral_constant<int, 6>{});
    default: return factors(std::integral_constant<int, 8>{});
  }
}

void multiply(const PackedMatrix& w, const Quantised& x, int count, int first, int last, float* y, size_t stride) {
  as_constants(w, [&]<class Bits, class Factor>(Bits, Factor) {
    multiply_as<Bits::value, Factor>(w, x, count, first, last, y, stride);
  });
}

// A row's scale and bias for each of its columns: that of a group.
template <int Bits, class Factor>
struct RowFactors {
  RowFactors(const PackedMatrix& w, int n)
      : per_group(w.group), at(static_cast<size_t>(n / kTile) * w.groups() * kTile + n % kTile),
        scales(static_cast<const Factor*>(w.scales)), biases(static_cast<const Factor*>(w.biases)) {}

  float operator()(int column, int quantum) const {
    const size_t factor = at + static_cast<size_t>(column / per_group) * kTile;
    return value(scales[factor]) * static_cast<float>(quantum) + value(biases[factor]);
  }

  int per_group;
  size_t at;
  const Factor *scales, *biases;
};

template <int Bits>
struct RowFactors<Bits, Super> {
  RowFactors(const PackedMatrix& w, int n)
      : row(n % kTile), factors(static_cast<const uint8_t*>(w.scales) + static_cast<size_t>(n / kTile) * kTile * w.factor_bytes()) {}

  float operator()(int column, int quantum) const {
    const SuperRow own(Bits, kTile, row, factors + static_cast<size_t>(column / kSuper) * kTile * super_form(Bits).row_bytes());
    return own.scale(column % kSuper) * static_cast<float>(quantum - super_form(Bits).centre) - own.minimum(column % kSuper);
  }

  int row;
  const uint8_t* factors;
};

template <int Bits, class Factor>
void unpack_row(const PackedMatrix& w, int n, float* out) {
  const RowFactors<Bits, Factor> numbers(w, n);
  const size_t block_bytes = kTile * w.block_bytes();
  const uint8_t* p = w.quanta + static_cast<size_t>(n / kTile) * w.blocks() * block_bytes;
  for (int block = 0; block < w.blocks(); block++, p += block_bytes)
    for (int k = 0; k < kBlock; k++) {
      const int stored = quantum(p, Bits, kTile, n % kTile, k / 4, k % 4);
      out[block * kBlock + k] = numbers(block * kBlock + k, Bits == 8 && kSignedBytes ? stored ^ 128 : stored);
    }
}

void unpack(const PackedMatrix& w, int first, int last, float* out) {
  as_constants(w, [&]<class Bits, class Factor>(Bits, Factor) {
    for (int n = first; n < last; n++, out += w.columns) unpack_row<Bits::value, Factor>(w, n, out);
  });
}

}  // namespace

extern const Kernels INGOT_NAME(kernels);
const Kernels INGOT_NAME(kernels) = {INGOT_TEXT(INGOT_ISA), kTile, kSignedBytes, quantise, multiply, unpack};

}  // namespace ingot
