// Which tokens of a launch belong to which sequence, and in which pages those keep their keys and values.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace ingot {

constexpr int kFarthest = std::numeric_limits<int>::max();  // no position is beyond it

// Tokens [first, first + count) of a launch are those of one sequence, whose table is the one numbered `row`: their keys and
// values are written to the places from `place` on, and they stand at the positions from `position` on.
struct Span {
  int first, count, row, place, position;
};

// A sequence's pages, in order, after those at the front that were forgotten: nobody sees what was there.
struct Table {
  int forgotten;
  std::vector<int32_t> pages;
  std::vector<int32_t> coded = {};  // instead of the first ones: pages in fewer bits, which are then not among the others
};

// Tokens need not see all pages that are full before them: they see so many, of which the first and the newest always, and the
// others by what one of so many tokens asks.
struct Choice {
  int seen, newest, asking;
};

// The spans of a launch; made once for all layers that share tables. A page that a span writes to is in no other table, or
// what it writes there is beyond what the others see.
class Spans {
 public:
  // `positions`, of each token of the launch, take the place of consecutive ones. Raises std::invalid_argument for spans that
  // are not in order, or have no table, for numbers that are negative, and for a choice of what cannot be chosen from: it is one
  // span's, of a sequence that has all of its pages.
  Spans(std::vector<Span> spans, std::vector<Table> tables, std::optional<std::vector<int32_t>> positions,
        std::optional<Choice> choice = std::nullopt);

  // Raises std::invalid_argument unless a launch of so many tokens has them, and the tables lead to a page of such states
  // [pages, kv_heads, tokens, size] wherever a token is written or seen.
  void check(int tokens, const mlx::core::Shape& states, int window) const;

  // Raises std::invalid_argument unless there are so many pages in fewer bits.
  void check_coded(int pages) const;

  auto begin() const { return spans_.begin(); }
  auto end() const { return spans_.end(); }
  size_t size() const { return spans_.size(); }
  const Table& table(const Span& span) const { return tables_[span.row]; }
  const Span* owner(int token) const {  // none of padding
    return token < tokens() && owners_[token] >= 0 ? &spans_[owners_[token]] : nullptr;
  }
  const std::vector<int32_t>& positions() const { return positions_; }  // of the tokens up to the last span's end; 0 of padding
  bool apart() const { return apart_; }                                 // no two are of one sequence
  const std::optional<Choice>& choice() const { return choice_; }       // none: tokens see all before them

 private:
  int tokens() const { return static_cast<int>(owners_.size()); }
  void take_positions(const std::optional<std::vector<int32_t>>& given);
  void check_choice() const;

  std::vector<Span> spans_;
  std::vector<Table> tables_;
  std::vector<int32_t> positions_, owners_;
  std::optional<Choice> choice_;
  std::optional<size_t> told_;  // how many positions were given
  int64_t pages_ = 0, coded_ = 0;  // that there must be
  bool apart_ = true;
};

// Raises std::invalid_argument unless such states [pages, kv_heads, tokens, size] can be read block by block.
void check_page(const mlx::core::Shape& states);

}  // namespace ingot
