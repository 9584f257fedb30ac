#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>

#include "arrive.h"
#include "attend.h"
#include "codec.h"
#include "convolve.h"
#include "draw.h"
#include "experts.h"
#include "floats.h"
#include "gguf_file.h"
#include "kernels.h"
#include "lent.h"
#include "linear.h"
#include "page_bindings.h"
#include "pool.h"
#include "product.h"
#include "rotation.h"
#include "rows.h"
#include "segments.h"
#include "recurrent_bindings.h"
#include "stack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ingot::lent;
using Arrays = std::vector<mlx::core::array>;

void bind_experts(nb::module_& module) {
  module.def(
      "gather",
      [](const mlx::core::array& x, const mlx::core::array& indices, std::shared_ptr<ingot::Weights> weights) {
        return ingot::gather(x, indices, lent(std::move(weights)));
      },
      "x"_a, "indices"_a, "weights"_a, "x [..., columns] times the weights of experts [..., k]: [..., k, rows].");
  module.def(
      "gather_gated",
      [](const mlx::core::array& x, const mlx::core::array& indices, std::shared_ptr<ingot::Weights> gate,
         std::shared_ptr<ingot::Weights> up, std::shared_ptr<ingot::Weights> down, float slope, float limit, float offset) {
        return ingot::gather_gated(x, indices,
                                   {lent(std::move(gate)), lent(std::move(up)), lent(std::move(down)), {slope, limit, offset}});
      },
      "x"_a, "indices"_a, "gate"_a, "up"_a, "down"_a, nb::kw_only(), "slope"_a, "limit"_a, "offset"_a,
      "down(gate * sigmoid(slope * gate) * (up + offset)) of experts [..., k]: [..., k, rows of down].");
}

void bind_arrival(nb::module_& module) {
  using Given = std::vector<std::pair<uintptr_t, size_t>>;  // (address, bytes from one expert to the next)
  auto targets = [](const Given& given) {
    std::vector<ingot::Target> taken;
    for (const auto& [address, stride] : given) taken.push_back({address, stride});
    return taken;
  };
  nb::enum_<ingot::Numbers>(module, "Numbers")
      .value("bytes", ingot::Numbers::bytes)
      .value("bfloat16", ingot::Numbers::bfloat16)
      .value("float16", ingot::Numbers::float16)
      .value("float32", ingot::Numbers::float32);
  nb::class_<ingot::Arrival>(module, "Arrival", "How an expert's bytes in a file become those of memory that kernels read.")
      .def(nb::init<>())
      .def(
          "add_packed",
          [targets](ingot::Arrival& arrival, int rows, int columns, int group, int bits, bool mxfp4, std::vector<int> given,
                    ingot::Numbers factors, const Given& to, ingot::Numbers stored) {
            arrival.add_packed(rows, columns, group, bits, mxfp4, std::move(given), factors, targets(to), stored);
          },
          nb::kw_only(), "rows"_a, "columns"_a, "group"_a, "bits"_a, "mxfp4"_a, "given"_a, "factors"_a, "to"_a, "stored"_a,
          "`given` are the numbers of quanta, scales and biases in what `fill` is given.")
      .def(
          "add_plain",
          [targets](ingot::Arrival& arrival, size_t count, int given, ingot::Numbers from, std::pair<uintptr_t, size_t> to,
                    ingot::Numbers stored) { arrival.add_plain(count, given, from, targets({to}).front(), stored); },
          nb::kw_only(), "count"_a, "given"_a, "from_"_a, "to"_a, "stored"_a)
      .def("fill", &ingot::Arrival::fill, "given"_a, "slot"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Addresses of an expert's arrays, and the slot that they go to. Any thread may call it, without Python's lock.");
}

// A layer's pages in fewer bits, and their form.
using GivenCoded = std::tuple<mlx::core::array, std::shared_ptr<ingot::CodedForm>>;

ingot::CodedStates coded_states(const GivenCoded& given) {
  return {std::get<0>(given), lent(std::get<1>(given))};
}

void bind_stack(nb::module_& module) {
  nb::class_<ingot::Weights>(module, "Weights", "A matrix [rows, columns], or one for each of several experts, as the kernels take it.")
      .def_static("packed", &ingot::Weights::packed, "quanta"_a, "scales"_a, "biases"_a, "bias"_a.none(), nb::kw_only(),
                  "group_size"_a, "bits"_a)
      .def_static("blocks", &ingot::Weights::blocks, "blocks"_a, "bias"_a.none(), nb::kw_only(), "bits"_a)
      .def_static("mxfp4", &ingot::Weights::mxfp4, "quanta"_a, "scales"_a, "bias"_a.none())
      .def_static("plain", &ingot::Weights::plain, "weight"_a, "bias"_a.none())
      .def_prop_ro("arrays", &ingot::Weights::arrays, "What it keeps alive.")
      .def_prop_ro("shape", [](const ingot::Weights& w) { return std::make_pair(w.matrix().rows, w.matrix().columns); });
  nb::class_<ingot::Stack>(module, "Stack", "The layers of a transformer as one operation.")
      .def(
          "__init__",
          [](ingot::Stack* made, const mlx::core::array& angles, int heads, int kv_heads, int head_dim, float scale,
             float eps, int rope_dims, bool rope_neighbours, float rope_gain) {
            auto rotation = std::make_shared<ingot::Rotation>(angles, rope_dims, rope_neighbours, rope_gain);
            new (made) ingot::Stack({heads, kv_heads, head_dim, scale, eps}, std::move(rotation));
          },
          "angles"_a, nb::kw_only(), "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "eps"_a, "rope_dims"_a,
          "rope_neighbours"_a, "rope_gain"_a)
      .def(
          "add",
          [](ingot::Stack& stack, const mlx::core::array& attention_norm, const mlx::core::array& mlp_norm,
             const ingot::Weights& q, const ingot::Weights& k, const ingot::Weights& v, const ingot::Weights& o,
             const ingot::Weights& gate, const ingot::Weights& up, const ingot::Weights& down,
             const std::optional<mlx::core::array>& q_norm, const std::optional<mlx::core::array>& k_norm) {
            const int hidden = q.matrix().columns, dim = stack.shape().head_dim;
            std::optional<ingot::Vector> q_weight, k_weight;
            if (q_norm) q_weight.emplace(*q_norm, dim);
            if (k_norm) k_weight.emplace(*k_norm, dim);
            stack.add({ingot::Vector(attention_norm, hidden), ingot::Vector(mlp_norm, hidden), q_weight, k_weight, q, k, v,
                       o, gate, up, down});
          },
          nb::kw_only(), "attention_norm"_a, "mlp_norm"_a, "q"_a, "k"_a, "v"_a, "o"_a, "gate"_a, "up"_a, "down"_a,
          "q_norm"_a.none() = nb::none(), "k_norm"_a.none() = nb::none(), "Put another layer on top.")
      .def(
          "__call__",
          [](std::shared_ptr<ingot::Stack> stack, const mlx::core::array& x, const Arrays& keys, const Arrays& values,
             std::shared_ptr<ingot::Spans> spans, const std::vector<GivenCoded>& coded) {
            std::vector<ingot::CodedStates> taken;
            for (const GivenCoded& own : coded) taken.push_back(coded_states(own));
            return ingot::run_stack(lent(std::move(stack)), x, keys, values, lent(std::move(spans)), taken);
          },
          "x"_a, "keys"_a, "values"_a, "spans"_a, "coded"_a = std::vector<GivenCoded>{},
          "x [..., hidden] through the layers; gives the result, the keys and the values, in one list.");
}

using Norm = std::optional<std::tuple<mlx::core::array, float, bool, bool>>;

std::optional<ingot::HeadNorm> head_norm(const Norm& norm) {
  if (!norm) return std::nullopt;
  const auto& [weight, eps, whole, centred] = *norm;
  const int length = static_cast<int>(weight.size());
  return ingot::HeadNorm{ingot::Vector(weight, length), length, eps, whole, centred};
}

void bind_attention(nb::module_& module) {
  nb::class_<ingot::Rotation>(module, "Rotation", "Rotary positions; attention that turns alike shares one.")
      .def(nb::init<const mlx::core::array&, int, bool, float>(), "angles"_a, nb::kw_only(), "dims"_a, "neighbours"_a,
           "gain"_a);
  nb::class_<ingot::CodedForm>(module, "CodedForm", "How pages are laid out in fewer bits.")
      .def(nb::init<int, bool, std::optional<size_t>, size_t, ingot::CodedForm::Side, ingot::CodedForm::Side>(), nb::kw_only(),
           "size"_a, "halves"_a, "centre"_a.none(), "head_bytes"_a, "keys"_a, "values"_a,
           "A side is (bits, numbers that share a scale, where codes begin, where scales begin, levels, signs).");
  nb::class_<ingot::Attention>(module, "Attention", "Attention over states in pages as one operation.")
      .def(
          "__init__",
          [](ingot::Attention* made, int heads, int kv_heads, int size, float scale, float cap,
             const std::optional<mlx::core::array>& sinks, const Norm& q_norm, const Norm& k_norm,
             std::shared_ptr<ingot::Rotation> rotation, bool gated) {
            new (made) ingot::Attention({heads, kv_heads, size, scale, cap}, sinks, head_norm(q_norm), head_norm(k_norm),
                                        std::move(rotation), gated);
          },
          nb::kw_only(), "heads"_a, "kv_heads"_a, "size"_a, "scale"_a, "cap"_a, "sinks"_a.none(), "q_norm"_a.none(),
          "k_norm"_a.none(), "rotation"_a.none(), "gated"_a, "A norm is (weight, eps, all heads as one, centred).")
      .def(
          "__call__",
          [](std::shared_ptr<ingot::Attention> attention, const mlx::core::array& q, const mlx::core::array& k,
             const mlx::core::array& v, const mlx::core::array& keys, const mlx::core::array& values,
             std::shared_ptr<ingot::Spans> spans, int window, const std::optional<GivenCoded>& coded) {
            std::optional<ingot::CodedStates> taken;
            if (coded) taken.emplace(coded_states(*coded));
            return ingot::run_attention(lent(std::move(attention)), q, k, v, keys, values, lent(std::move(spans)), window, taken);
          },
          "q"_a, "k"_a, "v"_a, "keys"_a, "values"_a, "spans"_a, "window"_a = 0, "coded"_a.none() = nb::none(),
          "What was attended to, the keys and the values. A token sees the `window` newest ones, or all where it is 0.");
}

void bind_codecs(nb::module_& module) {
  using Centre = std::optional<mlx::core::array>;
  nb::class_<ingot::Codec> codec(module, "Codec", "How vectors are put into fewer bits.");
  codec.attr("centres") = 2;  // that vectors can be encoded around
  codec
      .def_static("turbo", &ingot::Codec::turbo, "signs"_a, "borders"_a, "levels"_a, "keeps_length"_a,
                  "Directions, rotated; the borders are the positive ones.")
      .def_static("affine", &ingot::Codec::affine, "size"_a, "group"_a, "bits"_a, "Even steps within groups.")
      .def(
          "encode",
          [](std::shared_ptr<ingot::Codec> codec, const mlx::core::array& x, const Centre& centre, const Centre& other) {
            return ingot::encode(lent(std::move(codec)), x, centre, other);
          },
          "x"_a, "centre"_a.none() = nb::none(), "other"_a.none() = nb::none(),
          "Codes and scales of vectors [..., tokens, size].")
      .def(
          "decode",
          [](std::shared_ptr<ingot::Codec> codec, const mlx::core::array& codes, const mlx::core::array& scales,
             mlx::core::Dtype dtype, const Centre& centre, const Centre& other) {
            return ingot::decode(lent(std::move(codec)), codes, scales, dtype, centre, other);
          },
          "codes"_a, "scales"_a, "dtype"_a, "centre"_a.none() = nb::none(), "other"_a.none() = nb::none());
}

// Files and offsets in them.
using Pieces = std::vector<std::pair<std::shared_ptr<ingot::GgufFile>, int64_t>>;

ingot::FileRows file_rows(const Pieces& pieces, int rows, int row_bytes, int head) {
  ingot::FileRows made{{}, rows, row_bytes, head};
  for (const auto& [file, offset] : pieces) made.pieces.emplace_back(lent(file), offset);
  return made;
}

void bind_files(nb::module_& module) {
  nb::class_<ingot::GgufFile>(module, "GgufFile", "A GGUF file whose tensors are read when they are needed.")
      .def(nb::init<const std::string&, int64_t, int64_t>(), "path"_a, nb::kw_only(), "size"_a, "changed_ns"_a);
  module.def(
      "file_bytes",
      [](const Pieces& pieces, int rows, int row_bytes, int head) {
        return ingot::file_bytes(file_rows(pieces, rows, row_bytes, head));
      },
      "pieces"_a, nb::kw_only(), "rows"_a, "row_bytes"_a, "head"_a, "Rows as they lie in pieces (file, offset), read when needed.");
  module.def(
      "file_packed",
      [](const Pieces& pieces, int rows, int row_bytes, int head, int bits, bool minima) {
        return ingot::file_packed(file_rows(pieces, rows, row_bytes, head), bits, minima);
      },
      "pieces"_a, nb::kw_only(), "rows"_a, "row_bytes"_a, "head"_a, "bits"_a, "minima"_a,
      "Rows of blocks of 32 weights as mx.quantize would give them, read when needed.");
}

void bind_rows(nb::module_& module) {
  module.def("rms_norm", [](const mlx::core::array& x, const mlx::core::array& weight, float eps) {
    return ingot::rms_norm(x, weight, eps);
  }, "x"_a, "weight"_a, "eps"_a);
  module.def("layer_norm", [](const mlx::core::array& x, const std::optional<mlx::core::array>& weight,
                              const std::optional<mlx::core::array>& bias, float eps) {
    return ingot::layer_norm(x, weight, bias, eps);
  }, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a);
  nb::enum_<ingot::Gate>(module, "Gate")
      .value("silu", ingot::Gate::silu)
      .value("gelu", ingot::Gate::gelu)
      .value("gelu_tanh", ingot::Gate::gelu_tanh)
      .value("sigmoid", ingot::Gate::sigmoid);
  module.def("gated", [](ingot::Gate kind, const mlx::core::array& gate, const std::optional<mlx::core::array>& up) {
    return ingot::gated(kind, gate, up);
  }, "kind"_a, "gate"_a, "up"_a.none() = nb::none(), "act(gate) * up; without up, of the halves of gate.");
  module.def("snake", [](const mlx::core::array& x, const mlx::core::array& scale, const mlx::core::array& shift,
                         const mlx::core::array& alpha) { return ingot::snake(x, scale, shift, alpha); },
             "x"_a, "scale"_a, "shift"_a, "alpha"_a, "v + sin(alpha * v)^2 / alpha for v = x * scale + shift.");
  module.def("convolve", [](const mlx::core::array& x, const mlx::core::array& weight, const mlx::core::array& bias,
                            int dilation, int front, int count) {
    return ingot::convolve(x, weight, bias, dilation, front, count);
  }, "x"_a, "weight"_a, "bias"_a, "dilation"_a, "front"_a, "count"_a, "Rows over time from their neighbours. Needs a BLAS.");
  module.def("attend_segments", [](const mlx::core::array& queries, const mlx::core::array& keys,
                                   const mlx::core::array& values, float scale) {
    return ingot::attend_segments(queries, keys, values, scale);
  }, "queries"_a, "keys"_a, "values"_a, "scale"_a, "Of rows to all keys of their segment. Needs a BLAS.");
}

}  // namespace

NB_MODULE(_native, module) {
  nb::module_::import_("mlx.core");
  ingot::bind_pages(module);
  bind_stack(module);
  bind_attention(module);
  bind_rows(module);
  bind_files(module);
  bind_codecs(module);
  ingot::bind_recurrent(module);
  bind_experts(module);
  bind_arrival(module);
  module.def(
      "draw",
      [](const mlx::core::array& logits, const std::vector<std::tuple<float, int, float, float, float>>& draws) {
        std::vector<ingot::Draw> taken;
        for (const auto& [temperature, top_k, top_p, min_p, at] : draws)
          taken.push_back({temperature, top_p, min_p, at, top_k});
        return ingot::draw(logits, std::move(taken));
      },
      "logits"_a, "draws"_a,
      "A token for each row of logits [rows, vocab]; a draw is (temperature, top_k, top_p, min_p, number in [0, 1)).");
  module.def(
      "linear",
      [](const mlx::core::array& x, std::shared_ptr<ingot::Weights> weights) { return ingot::linear(x, lent(std::move(weights))); },
      "x"_a, "weights"_a, "x [..., columns] times the transpose of weights [rows, columns], with their bias.");
  module.def(
      "lookup",
      [](const mlx::core::array& ids, std::shared_ptr<ingot::Weights> weights) {
        return ingot::lookup(ids, lent(std::move(weights)));
      },
      "ids"_a, "weights"_a, "The rows of packed weights that ids name, as plain numbers.");
  module.def(
      "use_blas", [](uintptr_t address) { ingot::use_blas(reinterpret_cast<ingot::Sgemm>(address)); }, "address"_a,
      "The address of a cblas_sgemm that uses one thread a call.");
  module.def("use_one_path", &ingot::use_one_path, "one"_a,
             "Compute a row the same way however many there are, where there is another way for many rows.");
  module.def("instruction_set", [] { return ingot::kernels().name; }, "The instruction set that is used here.");
  module.def(
      "wide", []() -> const char* { return ingot::wide() == nullptr ? nullptr : ingot::wide()->name; },
      "The instruction set for many rows at once, if there is one.");
  module.def("threads", [] { return ingot::Pool::shared().threads(); }, "How many threads work on an operation.");
}
