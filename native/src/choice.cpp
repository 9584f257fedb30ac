#include "choice.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "floats.h"
#include "half.h"
#include "pool.h"
#include "room.h"

namespace ingot {
namespace {

constexpr float kAlways = 2;  // worth more than any share

// The mean keys of a sequence's first pages, [kv_heads, size, pages]: a query meets those of many pages at once.
class PageMeans {
 public:
  PageMeans(const States& states, const Table& table, int pages)
      : pages_(pages), size_(states.size), means_(static_cast<size_t>(states.kv_heads) * states.size * pages) {
    Pool::shared().each(
        states.kv_heads * pages,
        [&](int index) {
          if (states.halves)
            put(states.paged<Half>(table, index / pages), states.page, index / pages, index % pages);
          else
            put(states.paged<float>(table, index / pages), states.page, index / pages, index % pages);
        },
        kStep);
  }

  // The products of a query with all of them.
  void meet(const float* query, float scale, int kv_head, float* scores) const {
    std::fill_n(scores, pages_, 0.0f);
    for (int d = 0; d < size_; d++) {
      const float* means = row(kv_head, d);
      const float by = query[d] * scale;
      for (int page = 0; page < pages_; page++) scores[page] += by * means[page];
    }
  }

 private:
  static constexpr int kStep = 16;  // pages that a thread takes at a time

  template <class Number>
  void put(const Paged<Number>& paged, int tokens, int kv_head, int page) {
    static thread_local std::vector<float> sums;
    sums.assign(size_, 0.0f);
    const Number* key = paged.keys + paged.at(page * tokens);
    for (int token = 0; token < tokens; token++, key += size_)
      for (int d = 0; d < size_; d++) sums[d] += value(key[d]);
    for (int d = 0; d < size_; d++) row(kv_head, d)[page] = sums[d] / static_cast<float>(tokens);
  }

  float* row(int kv_head, int d) const { return means_.data() + (static_cast<size_t>(kv_head) * size_ + d) * pages_; }

  int pages_, size_;
  Room<float> means_;
};

// What each page is worth to the tokens of a span that ask.
std::vector<float> worths(const Heads& how, const Span& span, int asking, const float* q, const PageMeans& means, int pages) {
  const int count = span.count / asking, group = how.heads / how.kv_heads;
  std::vector<float> shares(static_cast<size_t>(count) * how.heads * pages), worth(pages, 0.0f);
  Pool::shared().each(count * how.heads, [&](int index) {
    const int token = span.first + (index / how.heads + 1) * asking - 1, head = index % how.heads;
    float* own = shares.data() + static_cast<size_t>(index) * pages;
    means.meet(q + (static_cast<size_t>(token) * how.heads + head) * how.size, how.scale, head / group, own);
    floats().softmax(own, pages);
  });
  for (size_t begin = 0; begin < shares.size(); begin += pages)
    for (int page = 0; page < pages; page++) worth[page] = std::max(worth[page], shares[begin + page]);
  return worth;
}

// The numbers of the best, in order; of those that are worth as much the first.
std::vector<int> best(std::vector<float> worth, const Choice& choice) {
  std::fill(worth.end() - choice.newest, worth.end(), kAlways);
  worth.front() = kAlways;
  std::vector<int> places(worth.size());
  std::iota(places.begin(), places.end(), 0);
  const auto end = places.begin() + choice.seen;
  std::nth_element(places.begin(), end, places.end(),
                   [&](int a, int b) { return worth[a] != worth[b] ? worth[a] > worth[b] : a < b; });
  std::sort(places.begin(), end);
  places.erase(end, places.end());
  return places;
}

}  // namespace

std::optional<Spans> chosen_pages(const Heads& how, const Spans& spans, const float* q, const States& states) {
  const Choice& choice = *spans.choice();
  const Span& span = *spans.begin();
  const Table& table = spans.table(span);
  const int full = span.place / states.page;
  if (full <= choice.seen || span.count < choice.asking) return std::nullopt;
  const PageMeans means(states, table, full);
  Table seen{0, {}};
  for (const int place : best(worths(how, span, choice.asking, q, means, full), choice)) seen.pages.push_back(table.pages[place]);
  seen.pages.insert(seen.pages.end(), table.pages.begin() + full, table.pages.end());
  const int place = choice.seen * states.page + span.place % states.page;
  return Spans({{span.first, span.count, 0, place, span.position}}, {std::move(seen)}, std::nullopt);
}

}  // namespace ingot
