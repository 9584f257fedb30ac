#include "recurrent_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "lent.h"
#include "recurrent.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ingot {
namespace {

constexpr const char* kThrough = "The same with the projections before and behind it.";

using Array = mlx::core::array;
using Pieces = std::vector<std::tuple<int, int, int, int>>;
using Place = std::tuple<int, int, int>;

std::vector<Piece> taken(const Pieces& pieces) {
  std::vector<Piece> made;
  for (const auto& [first, count, slot, start] : pieces) made.push_back({first, count, slot, start});
  return made;
}

using Held = std::shared_ptr<Weights>;
using Chains = std::vector<std::vector<Held>>;

Wanted wanted(const Pieces& pieces, int earlier) { return {taken(pieces), earlier, std::nullopt}; }

Wanted wanted(const Pieces& pieces, int earlier, const Chains& inputs, Held output) {
  Projections projections{{}, lent(std::move(output))};
  for (const std::vector<Held>& chain : inputs) {
    projections.in.emplace_back();
    for (const Held& weights : chain) projections.in.back().push_back(lent(weights));
  }
  return {taken(pieces), earlier, std::move(projections)};
}

Columns columns(const Place& place) { return {std::get<0>(place), std::get<1>(place), std::get<2>(place)}; }

void bind_convolution(nb::module_& module) {
  nb::class_<Convolution>(module, "Convolution", "A causal filter for each channel.")
      .def(nb::init<const Array&, const std::optional<Array>&, bool, bool>(), "weight"_a, "bias"_a.none(), nb::kw_only(),
           "silu"_a, "gated"_a)
      .def(
          "__call__",
          [](std::shared_ptr<Convolution> layer, const Array& x, const Array& tails, const Pieces& pieces, int earlier) {
            return convolve(lent(std::move(layer)), {x}, tails, wanted(pieces, earlier));
          },
          "x"_a, "tails"_a, "pieces"_a, "earlier"_a = 0)
      .def(
          "through",
          [](std::shared_ptr<Convolution> layer, const Array& x, const Chains& inputs, Held output,
             const Array& tails, const Pieces& pieces, int earlier) {
            return convolve(lent(std::move(layer)), {x}, tails, wanted(pieces, earlier, inputs, std::move(output)));
          },
          "x"_a, "inputs"_a, "output"_a, "tails"_a, "pieces"_a, "earlier"_a = 0, kThrough);
}

void bind_delta(nb::module_& module) {
  nb::class_<GatedDelta>(module, "GatedDelta", "A gated delta layer between its projections.")
      .def(
          "__init__",
          [](GatedDelta* made, int key_heads, int value_heads, int key_size, int value_size, float eps, const Place& q,
             const Place& k, const Place& v, const Place& z, const Place& b, const Place& a, const Array& filter,
             const Array& a_log, const Array& dt_bias, const Array& norm, bool decays_by_key, std::optional<float> bound,
             float most_strength, bool sigmoid_gate) {
            const Gate gate = sigmoid_gate ? Gate::sigmoid : Gate::silu;
            new (made) GatedDelta({key_heads, value_heads, key_size, value_size, eps, decays_by_key, bound, most_strength, gate},
                                  {columns(q), columns(k), columns(v), columns(z), columns(b), columns(a)}, filter, a_log,
                                  dt_bias, norm);
          },
          nb::kw_only(), "key_heads"_a, "value_heads"_a, "key_size"_a, "value_size"_a, "eps"_a, "q"_a, "k"_a, "v"_a, "z"_a,
          "b"_a, "a"_a, "filter"_a, "a_log"_a, "dt_bias"_a, "norm"_a, "decays_by_key"_a = false, "bound"_a.none() = nb::none(),
          "most_strength"_a = 1.0f, "sigmoid_gate"_a = false)
      .def(
          "__call__",
          [](std::shared_ptr<GatedDelta> layer, const Array& q, const Array& k, const Array& v, const Array& z, const Array& b,
             const Array& a, const Array& tails, const Array& states, const Pieces& pieces, int earlier) {
            return gated_delta(lent(std::move(layer)), {q, k, v, z, b, a}, tails, states, wanted(pieces, earlier));
          },
          "q"_a, "k"_a, "v"_a, "z"_a, "b"_a, "a"_a, "tails"_a, "states"_a, "pieces"_a, "earlier"_a = 0)
      .def(
          "through",
          [](std::shared_ptr<GatedDelta> layer, const Array& x, const Chains& inputs, Held output,
             const Array& tails, const Array& states, const Pieces& pieces, int earlier) {
            return gated_delta(lent(std::move(layer)), {x}, tails, states, wanted(pieces, earlier, inputs, std::move(output)));
          },
          "x"_a, "inputs"_a, "output"_a, "tails"_a, "states"_a, "pieces"_a, "earlier"_a = 0, kThrough);
}

void bind_scan(nb::module_& module) {
  nb::class_<Scan>(module, "Scan", "A mixer of Mamba 2's kind between its projections.")
      .def(
          "__init__",
          [](Scan* made, int heads, int groups, int head_size, int state_size, float dt_least, float dt_most, float eps,
             int norm_size, bool norm_first, const Array& filter, const std::optional<Array>& filter_bias,
             const Array& a_log, const Array& dt_bias, const Array& skip, const std::optional<Array>& norm) {
            new (made) Scan({heads, groups, head_size, state_size, dt_least, dt_most, eps, norm_size, norm_first}, filter,
                            filter_bias, a_log, dt_bias, skip, norm);
          },
          nb::kw_only(), "heads"_a, "groups"_a, "head_size"_a, "state_size"_a, "dt_least"_a, "dt_most"_a, "eps"_a,
          "norm_size"_a, "norm_first"_a, "filter"_a, "filter_bias"_a.none(), "a_log"_a, "dt_bias"_a, "skip"_a,
          "norm"_a.none())
      .def(
          "__call__",
          [](std::shared_ptr<Scan> layer, const Array& x, const Array& tails, const Array& states, const Pieces& pieces, int earlier) {
            return scan(lent(std::move(layer)), {x}, tails, states, wanted(pieces, earlier));
          },
          "x"_a, "tails"_a, "states"_a, "pieces"_a, "earlier"_a = 0)
      .def(
          "through",
          [](std::shared_ptr<Scan> layer, const Array& x, const Chains& inputs, Held output, const Array& tails,
             const Array& states, const Pieces& pieces, int earlier) {
            return scan(lent(std::move(layer)), {x}, tails, states, wanted(pieces, earlier, inputs, std::move(output)));
          },
          "x"_a, "inputs"_a, "output"_a, "tails"_a, "states"_a, "pieces"_a, "earlier"_a = 0, kThrough);
}

}  // namespace

void bind_recurrent(nb::module_& module) {
  bind_convolution(module);
  bind_delta(module);
  bind_scan(module);
}

}  // namespace ingot
