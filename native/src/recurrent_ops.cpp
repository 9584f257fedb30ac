#include <algorithm>
#include <functional>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "recurrent.h"
#include "strided.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

using Reads = std::vector<const float*>;
using Writes = std::vector<float*>;
using Body = std::function<void(const Reads& given, float* y, const Writes& states)>;

// An input whose memory lives until the operation is done.
struct Rows {
  explicit Rows(const mx::array& a)
      : data(a.data<float>()), contiguous(a.flags().row_contiguous), shape(a.shape()), strides(a.strides()) {}

  const float* data;
  bool contiguous;
  mx::Shape shape;
  mx::Strides strides;
};

// Gives y and the states, which are the last inputs.
class OverStates : public mx::Primitive {
 public:
  OverStates(mx::Stream stream, const char* name, size_t states, Body body)
      : Primitive(stream), name_(name), states_(states), body_(std::move(body)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    // Every output holds all inputs until it is evaluated, and what many hold is nobody's to overwrite.
    for (mx::array& output : outputs)
      if (&output.inputs() != &inputs) output.inputs().clear();
    const size_t given = inputs.size() - states_;
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    Writes writes;
    for (size_t i = 0; i < states_; i++) {
      const mx::array& state = inputs[given + i];
      if (!state.flags().row_contiguous) throw std::runtime_error("ingot_native: a state is not contiguous");
      outputs[1 + i].copy_shared_buffer(state);
      writes.push_back(outputs[1 + i].data<float>());
    }
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    for (mx::array& output : outputs) encoder.set_output_array(output);
    std::vector<Rows> rows;
    for (size_t i = 0; i < given; i++) rows.push_back(Rows(inputs[i]));
    encoder.dispatch([body = body_, rows = std::move(rows), writes = std::move(writes), y = outputs[0].data<float>()] {
      std::vector<std::vector<float>> held(rows.size());  // what has to be put into rows first
      Reads reads;
      for (size_t i = 0; i < rows.size(); i++) {
        if (!rows[i].contiguous) held[i] = gathered(rows[i].data, rows[i].shape, rows[i].strides);
        reads.push_back(rows[i].contiguous ? rows[i].data : held[i].data());
      }
      body(reads, y, writes);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  size_t states_;
  Body body_;
};

int tokens_of(const mx::array& x) { return static_cast<int>(x.size() / std::max(x.shape(-1), 1)); }

void check_pieces(const std::vector<Piece>& pieces, int tokens, int slots) {
  int end = 0;
  for (const Piece& piece : pieces) {
    require(piece.first >= end && piece.count > 0 && piece.first + piece.count <= tokens, "pieces must follow one another");
    require(piece.slot >= 0 && piece.slot < slots && piece.start >= 0, "a piece does not fit in the states");
    end = piece.first + piece.count;
  }
  std::vector<int> seen;
  for (const Piece& piece : pieces) seen.push_back(piece.slot);
  std::sort(seen.begin(), seen.end());
  require(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "a slot can have only one piece");
}

void check_state(const mx::array& state, const mx::Shape& row) {
  require(state.dtype() == mx::float32 && state.ndim() == row.size() + 1 &&
              std::equal(row.begin(), row.end(), state.shape().begin() + 1),
          "the states do not fit");
}

void clear_padding(const std::vector<Piece>& pieces, int tokens, int width, float* y) {
  int end = 0;
  auto clear = [&](int until) {
    std::fill(y + static_cast<size_t>(end) * width, y + static_cast<size_t>(until) * width, 0.0f);
  };
  for (const Piece& piece : pieces) {
    clear(piece.first);
    end = piece.first + piece.count;
  }
  clear(tokens);
}

std::vector<mx::array> over_states(const char* name, std::vector<mx::array> inputs, const std::vector<mx::array>& states,
                                   int width, Body body, const mx::Stream& stream) {
  for (mx::array& input : inputs) input = mx::astype(input, mx::float32, stream);
  mx::Shape shape = inputs[0].shape();
  shape.back() = width;
  std::vector<mx::Shape> shapes{shape};
  for (const mx::array& state : states) shapes.push_back(state.shape());
  inputs.insert(inputs.end(), states.begin(), states.end());
  return mx::array::make_arrays(std::move(shapes), std::vector<mx::Dtype>(1 + states.size(), mx::float32),
                                std::make_shared<OverStates>(stream, name, states.size(), std::move(body)), inputs);
}

}  // namespace

std::vector<mx::array> convolve(std::shared_ptr<const Convolution> layer, const mx::array& x, const mx::array& tails,
                                std::vector<Piece> pieces, mx::StreamOrDevice s) {
  require(x.ndim() >= 1 && x.shape(-1) == layer->width(), "x has the wrong width");
  check_state(tails, {layer->taps().kept(), layer->channels()});
  const int tokens = tokens_of(x);
  check_pieces(pieces, tokens, tails.shape(0));
  const int width = layer->channels();
  auto body = [layer, pieces = std::move(pieces), tokens](const Reads& given, float* y, const Writes& states) {
    clear_padding(pieces, tokens, layer->channels(), y);
    layer->run(given[0], pieces, states[0], y);
  };
  return over_states("IngotConvolution", {x}, {tails}, width, std::move(body), mx::to_stream(s, mx::Device::cpu));
}

std::vector<mx::array> gated_delta(std::shared_ptr<const GatedDelta> layer, const mx::array& qkv, const mx::array& z,
                                   const mx::array& b, const mx::array& a, const mx::array& tails,
                                   const mx::array& states, std::vector<Piece> pieces, mx::StreamOrDevice s) {
  for (const mx::array* input : {&qkv, &z, &b, &a})
    require(input->ndim() >= 1 && tokens_of(*input) == tokens_of(qkv), "the inputs disagree about the tokens");
  const DeltaShape& shape = layer->shape();
  DeltaInputs in{};
  in.qkv_width = qkv.shape(-1), in.z_width = z.shape(-1), in.b_width = b.shape(-1), in.a_width = a.shape(-1);
  require(layer->fits(in), "the inputs are too narrow for the heads");
  check_state(tails, {layer->taps().kept(), layer->taps().channels()});
  check_state(states, {shape.value_heads, shape.value_size, shape.key_size});
  require(tails.shape(0) == states.shape(0), "the states disagree about the slots");
  const int tokens = tokens_of(qkv), width = layer->width();
  check_pieces(pieces, tokens, states.shape(0));
  auto body = [layer, pieces = std::move(pieces), in, tokens](const Reads& given, float* y, const Writes& states) {
    DeltaInputs own = in;
    own.qkv = given[0], own.z = given[1], own.b = given[2], own.a = given[3];
    clear_padding(pieces, tokens, layer->width(), y);
    layer->run(own, pieces, states[0], states[1], y);
  };
  return over_states("IngotGatedDelta", {qkv, z, b, a}, {tails, states}, width, std::move(body),
                     mx::to_stream(s, mx::Device::cpu));
}

std::vector<mx::array> scan(std::shared_ptr<const Scan> layer, const mx::array& x, const mx::array& tails,
                            const mx::array& states, std::vector<Piece> pieces, mx::StreamOrDevice s) {
  const ScanShape& shape = layer->shape();
  require(x.ndim() >= 1 && x.shape(-1) == layer->width(), "x has the wrong width");
  check_state(tails, {layer->taps().kept(), layer->taps().channels()});
  check_state(states, {shape.heads, shape.head_size, shape.state_size});
  require(tails.shape(0) == states.shape(0), "the states disagree about the slots");
  const int tokens = tokens_of(x), width = layer->inner();
  check_pieces(pieces, tokens, states.shape(0));
  auto body = [layer, pieces = std::move(pieces), tokens](const Reads& given, float* y, const Writes& states) {
    clear_padding(pieces, tokens, layer->inner(), y);
    layer->run(given[0], tokens, pieces, states[0], states[1], y);
  };
  return over_states("IngotScan", {x}, {tails, states}, width, std::move(body), mx::to_stream(s, mx::Device::cpu));
}

}  // namespace ingot
