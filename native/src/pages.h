// Tokens of states in pages [pages, kv_heads, tokens, size], of any numbers, written in place: the arrays that are given back
// are the ones given, in the same memory, and who else holds them sees them change.
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace ingot {

// The first `tokens` tokens of the page `target` become those of the page `source`.
struct PageCopy {
  int source, target, tokens;
};

// All copies in each of the arrays, one after the other. Raises std::invalid_argument for pages that an array has not.
std::vector<mlx::core::array> copy_tokens(const std::vector<mlx::core::array>& arrays, std::vector<PageCopy> copies,
                                          mlx::core::StreamOrDevice stream = {});

// Tokens [kv_heads, count, size] become those of a page from the token `begin` on. Raises std::invalid_argument where they
// do not fit.
mlx::core::array write_tokens(const mlx::core::array& array, int page, int begin, const mlx::core::array& tokens,
                              mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
