// What a transformer layer does between its matrix products, in float32; compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "coded_pages.h"
#include "half.h"

namespace ingot {

// As many floats as fill whole lines of a cache: what lies behind them begins where a line does.
static inline size_t whole_lines(size_t floats) { return (floats + 15) / 16 * 16; }

enum class Gate { silu, gelu, gelu_tanh, sigmoid };

// How the queries of a head see its keys.
struct Sight {
  int dim;
  float scale;  // of the scores
  float cap;    // a score s becomes cap * tanh(s / cap); 0: it stays what it is
  int window;   // a query sees as many of the newest keys, its own among them; 0: all of them
};

// One head's keys and values of a sequence, which lie in pages. Sums are cut by places and pages end where blocks do, so that
// they come out the same wherever the pages lie, however large they are and however many queries come together.
template <class Number>
struct Paged {
  const Number *keys, *values;  // in the first of all pages
  const int32_t* pages;         // the sequence's
  int forgotten;                // of its pages, before these
  int bits;                     // a page has 1 << bits tokens
  int dim;
  size_t stride;                // from page to page, in numbers

  // How far on the token at a place lies; up to the next block's they lie behind one another.
  size_t at(int place) const {
    const size_t inside = place & ((1 << bits) - 1);
    return static_cast<size_t>(pages[(place >> bits) - forgotten]) * stride + inside * dim;
  }
};

// What rows (queries times heads) have found in some keys: weights and values are as if the largest score were 0.
struct Found {
  int rows, dim;
  float* sums;     // of weights times values, [rows, dim]
  float* largest;  // scores
  float* total;    // of the weights

  Found(int rows, int dim, float* room)
      : rows(rows), dim(dim), sums(room), largest(room + static_cast<size_t>(rows) * dim), total(largest + rows) {}
  static size_t size(int rows, int dim) { return whole_lines(static_cast<size_t>(rows) * (dim + 2)); }
};

struct Floats {
  // y = weight * x / sqrt(mean(x * x) + eps), over `size` values.
  void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* y);
  // y = weight * (x - mean(x)) / sqrt(variance(x) + eps) + bias; either may be absent.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int size, float* y);
  void (*add)(float* y, const float* x, size_t size);
  // Scores become shares of one, in place.
  void (*softmax)(float* scores, int size);
  // gate = gate * sigmoid(gate) * up.
  void (*swiglu)(float* gate, const float* up, size_t size);
  // y = act(gate) * up; y may be gate.
  void (*gate)(Gate kind, const float* gate, const float* up, size_t size, float* y);
  // Turns the pairs of a head's first `dims` values; a pair is two neighbours, or a value and the one dims / 2 on.
  void (*rotate)(float* head, const float* cosines, const float* sines, int dims, bool neighbours);
  // What `queries` tokens in a row find in one stretch of keys; the last of them sees `keys` keys and each one before it one
  // less. `group` heads that share keys and values lie behind one another, tokens `stride` apart, in q; where q is null,
  // they are those of the call before with the same `scratch`, for which see attend_scratch.
  void (*attend)(const Sight& how, const float* q, int queries, int group, size_t stride, const Paged<float>& paged, int keys,
                 int stretch, float* scratch, Found found);
  void (*attend_halves)(const Sight& how, const float* q, int queries, int group, size_t stride, const Paged<Half>& paged,
                        int keys, int stretch, float* scratch, Found found);
  // Adds what was found in one stretch to what was found in those before it.
  void (*merge)(Found all, Found more);
  // Each number as half_of has it.
  void (*halve)(const float* x, size_t size, Half* y);
  // As `attend`, of a sequence whose first pages are coded, where a page is a block of keys. No window.
  void (*attend_coded)(const Sight& how, const float* q, int queries, int group, size_t stride, const Coded& coded,
                       const Paged<float>& paged, int keys, int stretch, float* scratch, Found found);
  void (*attend_coded_halves)(const Sight& how, const float* q, int queries, int group, size_t stride, const Coded& coded,
                              const Paged<Half>& paged, int keys, int stretch, float* scratch, Found found);
  // y = v + sin(alpha * v)^2 / alpha for v = x * scale + shift, over `size` values.
  void (*snake)(const float* x, const float* scale, const float* shift, const float* alpha, int size, float* y);
};

constexpr int kKeyBlock = 64;  // keys whose scores exist at once
constexpr int kStretch = 512;  // keys of a stretch: few enough that one long sequence keeps many threads busy

// The stretches that queries see.
struct Stretches {
  int first, last;

  Stretches(const Sight& how, int queries, int keys)
      : first(oldest(how, queries, keys) / kStretch), last((keys - 1) / kStretch) {}
  static int oldest(const Sight& how, int queries, int keys) {  // key that any of them sees
    return how.window > 0 && keys - queries + 1 > how.window ? keys - queries + 1 - how.window : 0;
  }
};

// What a tile of rows (queries times heads) needs while blocks of keys pass by.
struct Tile {
  static constexpr int kMostRows = 8, kMostPanel = 32;  // of any instruction set

  Tile(float* scratch, int rows, int dim)
      : padded((rows + kMostRows - 1) / kMostRows * kMostRows), q(scratch), panel(q + whole_lines(static_cast<size_t>(padded) * dim)),
        scores(panel + static_cast<size_t>(kMostPanel) * (dim + 3)), worth(scores + static_cast<size_t>(padded) * kKeyBlock),
        values(worth + whole_lines(padded)), end(values + static_cast<size_t>(kKeyBlock) * dim) {}

  static size_t size(int rows, int dim) {
    const Tile tile(nullptr, rows, dim);
    return tile.end - tile.q;
  }

  int padded;
  float *q, *panel, *scores, *worth, *values, *end;
};

// What it needs besides where pages are coded: a page's keys, the queries as they are and as they meet codes, and products.
struct CodedTile {
  static constexpr int kLeastGroup = 8;  // numbers that share a scale

  CodedTile(float* scratch, int rows, int dim)
      : keys(scratch), q(keys + static_cast<size_t>(kKeyBlock) * dim), turned(q + whole_lines(static_cast<size_t>(rows) * dim)),
        plain(turned + whole_lines(static_cast<size_t>(rows) * dim)), products(plain + whole_lines(static_cast<size_t>(rows) * dim)),
        sums(products + static_cast<size_t>(rows) * kKeyBlock), end(sums + whole_lines(static_cast<size_t>(rows) * (dim / kLeastGroup + 1))) {}

  static size_t size(int rows, int dim) {
    const CodedTile tile(nullptr, rows, dim);
    return tile.end - tile.keys;
  }

  float *keys, *q, *turned, *plain, *products;
  float* sums;  // of queries, by row and group
  float* end;
};

// Values that `attend` needs room for.
static inline size_t attend_scratch(int rows, int dim) {
  const int padded = (rows + Tile::kMostRows - 1) / Tile::kMostRows * Tile::kMostRows;
  return Tile::size(rows, dim) + CodedTile::size(padded, dim);
}

const Floats& floats();  // of the same instruction set as kernels()

}  // namespace ingot
