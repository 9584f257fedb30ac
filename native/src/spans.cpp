#include "spans.h"

#include <algorithm>

#include "floats.h"
#include "weights.h"

namespace ingot {

Spans::Spans(std::vector<Span> spans, std::vector<Table> tables, std::optional<std::vector<int32_t>> positions,
             std::optional<Choice> choice)
    : spans_(std::move(spans)), tables_(std::move(tables)), choice_(choice) {
  for (const Table& table : tables_) {
    require(table.forgotten >= 0, "no fewer than no pages are forgotten");
    int32_t least = 0, most = -1;
    for (const int32_t page : table.pages) {
      least = std::min(least, page);
      most = std::max(most, page);
    }
    require(least >= 0, "a page's number is not negative");
    pages_ = std::max(pages_, int64_t{most} + 1);
    for (const int32_t page : table.coded) {
      require(page >= 0, "a page's number is not negative");
      coded_ = std::max(coded_, int64_t{page} + 1);
    }
    require(table.coded.empty() || static_cast<size_t>(table.forgotten) == table.coded.size(), "coded pages stand in front of all others");
  }
  std::vector<bool> taken(tables_.size());
  for (const Span& span : spans_) {
    require(span.first >= tokens() && span.count > 0 && span.count <= kFarthest - span.first, "spans must follow one another");
    require(span.row >= 0 && static_cast<size_t>(span.row) < tables_.size(), "a span has no table");
    require(span.place >= 0 && span.count <= kFarthest - kStretch - span.place && span.position >= 0 && span.count <= kFarthest - span.position,
            "a span's places and positions are not negative, and not too far");
    owners_.resize(span.first, -1);
    owners_.resize(span.first + span.count, static_cast<int32_t>(&span - spans_.data()));
    apart_ = apart_ && !taken[span.row];
    taken[span.row] = true;
  }
  take_positions(positions);
  if (choice_) check_choice();
}

void Spans::check_choice() const {
  require(spans_.size() == 1, "pages are chosen for one span");
  require(table(spans_[0]).forgotten == 0, "pages are chosen among all of a sequence");
  require(choice_->newest >= 0 && choice_->seen > choice_->newest && choice_->asking > 0,
          "the first page and the newest are among those that are seen, and some token asks for others");
}

void Spans::take_positions(const std::optional<std::vector<int32_t>>& given) {
  if (given) {
    told_ = given->size();
    require(*told_ >= owners_.size(), "there must be a position for each token");
    require(std::all_of(given->begin(), given->end(), [](int32_t position) { return position >= 0; }), "a position is not negative");
    positions_.assign(given->begin(), given->begin() + tokens());
    return;
  }
  positions_.resize(tokens());
  for (const Span& span : spans_)
    for (int i = 0; i < span.count; i++) positions_[span.first + i] = span.position + i;
}

void Spans::check(int tokens, const mlx::core::Shape& states, int window) const {
  check_page(states);
  require(window >= 0, "a window is not negative");
  require(!choice_ || window == 0, "what a window shows is not chosen");
  require(this->tokens() <= tokens, "a span has tokens that the launch has not");
  require(!told_ || *told_ == static_cast<size_t>(tokens), "there must be a position for each token");
  require(pages_ <= states[0], "a table has pages that the states have not");
  for (const Span& span : spans_) {
    const Table& table = this->table(span);
    const int64_t first = int64_t{table.forgotten} * states[2], begin = table.coded.empty() ? first : 0;
    const int64_t end = first + static_cast<int64_t>(table.pages.size()) * states[2];
    require(table.coded.empty() || (window == 0 && states[2] == kKeyBlock), "coded pages have 64 tokens, and no window");
    require(table.coded.empty() || span.place >= first, "a span writes to coded pages");
    const int64_t oldest = window > 0 ? std::max(int64_t{0}, int64_t{span.place} + 1 - window) : 0;
    require(begin <= oldest && span.place + int64_t{span.count} <= end, "a table does not cover what its span sees");
  }
}

void Spans::check_coded(int pages) const { require(coded_ <= pages, "a table has coded pages that there are not"); }

void check_page(const mlx::core::Shape& states) {
  require(states[2] > 0 && states[2] % kKeyBlock == 0 && kStretch % states[2] == 0, "a page has 64, 128, 256 or 512 tokens");
}

}  // namespace ingot
