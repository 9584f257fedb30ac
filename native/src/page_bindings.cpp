#include "page_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "pages.h"
#include "reserve.h"
#include "spans.h"

namespace ingot {
namespace nb = nanobind;
using namespace nb::literals;
namespace {

using Integers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<int32_t> copied(const Integers& given) { return {given.data(), given.data() + given.size()}; }

void bind_spans(nb::module_& module) {
  nb::class_<Spans>(module, "Spans", "Which tokens of a launch belong to which sequence, and in which pages that lies.")
      .def(
          "__init__",
          [](Spans* made, const std::vector<std::tuple<int, int, int, int, int>>& spans,
             const std::vector<std::tuple<int, Integers, Integers>>& tables, const std::optional<Integers>& positions,
             const std::optional<std::tuple<int, int, int>>& choice) {
            std::vector<Span> taken;
            for (const auto& [first, count, row, place, position] : spans) taken.push_back({first, count, row, place, position});
            std::vector<Table> copies;
            for (const auto& [forgotten, pages, coded] : tables) copies.push_back({forgotten, copied(pages), copied(coded)});
            std::optional<std::vector<int32_t>> told;
            if (positions) told = copied(*positions);
            std::optional<Choice> chooses;
            if (choice) chooses = Choice{std::get<0>(*choice), std::get<1>(*choice), std::get<2>(*choice)};
            new (made) Spans(std::move(taken), std::move(copies), std::move(told), chooses);
          },
          "spans"_a, "tables"_a, "positions"_a.none() = nb::none(), "choice"_a.none() = nb::none(),
          "A span is (first token, tokens, table, place of the first, its position), a table (pages forgotten, pages, "
          "coded pages in place of those forgotten), a choice (pages seen, newest of them, tokens of which one asks).");
}

}  // namespace

void bind_pages(nb::module_& module) {
  bind_spans(module);
  module.def(
      "reserve",
      [](const std::vector<int>& shape, mlx::core::Dtype dtype) { return reserve({shape.begin(), shape.end()}, dtype); },
      "shape"_a, "dtype"_a, "Zeros that take memory only where they are written.");
  module.def("discard", &discard, "array"_a, "rows"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Give back the memory of these rows of the first axis, which read as zeros from now on.");
  module.def(
      "copy_tokens",
      [](const std::vector<mlx::core::array>& arrays, const std::vector<std::tuple<int, int, int>>& copies) {
        std::vector<PageCopy> taken;
        for (const auto& [source, target, tokens] : copies) taken.push_back({source, target, tokens});
        return copy_tokens(arrays, std::move(taken));
      },
      "arrays"_a, "copies"_a, "A copy is (source page, target page, tokens).");
  module.def(
      "write_tokens",
      [](const mlx::core::array& array, int page, int begin, const mlx::core::array& tokens) {
        return write_tokens(array, page, begin, tokens);
      },
      "array"_a, "page"_a, "begin"_a, "tokens"_a, "Tokens [kv_heads, count, size] into a page, from its token `begin` on.");
}

}  // namespace ingot
