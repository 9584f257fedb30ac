// Which pages of a long sequence the tokens of a launch see, where they need not see all of them: then reading on takes as
// long behind many tokens as behind some.
#pragma once

#include <optional>

#include "attend.h"
#include "spans.h"

namespace ingot {

// The span of a launch that has a choice, with a table of what its tokens see: the best full pages before them, in order, and
// their own. q [tokens, heads, size] are normed and turned, and the states hold all keys. None where they see all.
//
// A page is known by the mean of its keys. It is worth the largest share of attention that any of the tokens that ask, in any
// head, would give to that; the first page, which attention rests on, and the newest are always seen.
std::optional<Spans> chosen_pages(const Heads& how, const Spans& spans, const float* q, const States& states);

}  // namespace ingot
