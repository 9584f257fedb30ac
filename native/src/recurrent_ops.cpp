#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>

#include "in_place.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "product.h"
#include "recurrent.h"
#include "strided.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

using Reads = std::vector<const float*>;
using Writes = std::vector<float*>;

// What a layer computes of some pieces: y and the states, from what it is given.
using Run = std::function<void(const Reads& given, const std::vector<Piece>& pieces, float* y, const Writes& states)>;

// An input whose memory lives until the operation is done.
struct Rows {
  explicit Rows(const mx::array& a)
      : data(a.data<float>()), contiguous(a.flags().row_contiguous), shape(a.shape()), strides(a.strides()) {}

  const float* data;
  bool contiguous;
  mx::Shape shape;
  mx::Strides strides;
};

// What a layer is given, and what it gives, where its projections are part of the operation.
class Projected {
 public:
  Projected(const Projections& through, const float* x, int tokens, int width)
      : out_(*through.out), inner_(memory(tokens, width)) {
    std::vector<Product> products;
    auto product = [&](const Weights& weights) {
      held_.push_back(memory(tokens, weights.matrix().rows));
      return Product{&weights.matrix(), held_.back().get()};
    };
    for (size_t i = 0; i < through.in.size(); i++) {
      const auto same = std::find(through.in.begin(), through.in.begin() + i, through.in[i]);
      if (const size_t first = same - through.in.begin(); first < i) {
        given_.push_back(given_[first]);
        continue;
      }
      products.push_back(product(*through.in[i].front()));
      given_.push_back(products.back().y);
    }
    multiply(products, x, tokens);
    for (size_t i = 0; i < through.in.size(); i++)
      for (size_t next = 1; next < through.in[i].size(); next++) {
        const Product behind = product(*through.in[i][next]);
        multiply({behind}, given_[i], tokens);
        given_[i] = behind.y;
      }
  }

  const Reads& given() const { return given_; }
  float* inner() const { return inner_.get(); }
  void give(int tokens, float* y) const { multiply({{&out_.matrix(), y}}, inner_.get(), tokens); }

 private:
  using Memory = std::unique_ptr<float[]>;
  // Not filled with zeros first, which would take as long as reading it.
  static Memory memory(int tokens, int width) { return Memory(new float[static_cast<size_t>(tokens) * width]); }

  const Weights& out_;
  Memory inner_;
  std::vector<Memory> held_;
  Reads given_;
};

// One call of an operation.
struct Call {
  Run run;
  Wanted wanted;
  int tokens, width;              // of what `run` gives
  std::vector<size_t> row_sizes;  // of each state

  void operator()(const std::vector<Rows>& rows, float* y, const Writes& states, const Writes& before) const;

 private:
  void run_all(const Reads& given, float* y, const Writes& states, const Writes& before) const;
  void clear_padding(float* y) const;
  void keep(int without, const Writes& states, const Writes& before) const;
};

void Call::operator()(const std::vector<Rows>& rows, float* y, const Writes& states, const Writes& before) const {
  std::vector<std::vector<float>> held(rows.size());  // what has to be put into rows first
  Reads given;
  for (size_t i = 0; i < rows.size(); i++) {
    if (!rows[i].contiguous) held[i] = gathered(rows[i].data, rows[i].shape, rows[i].strides);
    given.push_back(rows[i].contiguous ? rows[i].data : held[i].data());
  }
  if (!wanted.through) {
    run_all(given, y, states, before);
    return;
  }
  const Projected projected(*wanted.through, given[0], tokens, width);
  run_all(projected.given(), projected.inner(), states, before);
  projected.give(tokens, y);
}

void Call::run_all(const Reads& given, float* y, const Writes& states, const Writes& before) const {
  clear_padding(y);
  // Where earlier states are wanted, the last tokens go one by one. That is the same to the last bit, as no token's
  // arithmetic knows of the ones after it.
  for (int without = wanted.earlier; without >= 0; without--) {
    std::vector<Piece> next;
    for (const Piece& piece : wanted.pieces) {
      const int done = without == wanted.earlier ? 0 : std::max(0, piece.count - without - 1);
      const int count = std::max(0, piece.count - without) - done;
      if (count > 0) next.push_back({piece.first + done, count, piece.slot, piece.start + done});
    }
    if (!next.empty()) run(given, next, y, states);
    if (without > 0) keep(without, states, before);
  }
}

void Call::clear_padding(float* y) const {
  int end = 0;
  auto clear = [&](int until) {
    std::fill(y + static_cast<size_t>(end) * width, y + static_cast<size_t>(until) * width, 0.0f);
  };
  for (const Piece& piece : wanted.pieces) {
    clear(piece.first);
    end = piece.first + piece.count;
  }
  clear(tokens);
}

void Call::keep(int without, const Writes& states, const Writes& before) const {
  Pool::shared().each(static_cast<int>(wanted.pieces.size()), [&](int index) {
    const Piece& piece = wanted.pieces[index];
    const bool empty = piece.count < without || (piece.count == without && piece.start == 0);
    for (size_t i = 0; i < states.size(); i++) {
      float* to = before[i] + ((without - 1) * wanted.pieces.size() + index) * row_sizes[i];
      if (empty)
        std::fill(to, to + row_sizes[i], 0.0f);
      else
        std::memcpy(to, states[i] + piece.slot * row_sizes[i], sizeof(float) * row_sizes[i]);
    }
  });
}

// Gives y and the states, which are the last inputs, and earlier states where they are asked for.
class OverStates : public mx::Primitive {
 public:
  OverStates(mx::Stream stream, const char* name, Call call)
      : Primitive(stream), name_(name), call_(std::make_shared<const Call>(std::move(call))) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    let_go(inputs, outputs);
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    const size_t states = call_->row_sizes.size(), given = inputs.size() - states;
    std::vector<Rows> rows;
    for (size_t i = 0; i < given; i++) rows.push_back(Rows(inputs[i]));
    Writes kept, before;
    for (size_t i = 0; i < states; i++) {
      const mx::array& state = inputs[given + i];
      if (!state.flags().row_contiguous) throw std::runtime_error("ingot_native: a state is not contiguous");
      outputs[1 + i].copy_shared_buffer(state);
      kept.push_back(outputs[1 + i].data<float>());
    }
    for (size_t i = 0; i < outputs.size(); i++) {
      if (i == 0 || i > states) outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
      if (i > states) before.push_back(outputs[i].data<float>());
      encoder.set_output_array(outputs[i]);
    }
    encoder.dispatch([call = call_, rows = std::move(rows), kept = std::move(kept), before = std::move(before),
                      y = outputs[0].data<float>()] { (*call)(rows, y, kept, before); });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  std::shared_ptr<const Call> call_;
};

int tokens_of(const mx::array& x) { return static_cast<int>(x.size() / std::max(x.shape(-1), 1)); }

void check_pieces(const std::vector<Piece>& pieces, int tokens, int slots) {
  int end = 0;
  std::vector<int> seen;
  for (const Piece& piece : pieces) {
    require(piece.first >= end && piece.count > 0 && piece.count <= tokens - piece.first, "pieces must follow one another");
    require(piece.slot >= 0 && piece.slot < slots && piece.start >= 0 && piece.count <= kFarthest - piece.start,
            "a piece does not fit in the states");
    end = piece.first + piece.count;
    seen.push_back(piece.slot);
  }
  std::sort(seen.begin(), seen.end());
  require(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "a slot can have only one piece");
}

// A state [slots, ...]: the array, and what a row of it must be.
struct State {
  const mx::array& array;
  mx::Shape row;
};

int width_of(const std::vector<mx::array>& given, const Wanted& wanted, size_t index) {
  if (!wanted.through) return given.at(index).shape(-1);
  return wanted.through->in.at(index).back()->matrix().rows;
}

// That there are so many inputs, of the same tokens, or projections that make them; and that these fit.
void check_given(const std::vector<mx::array>& given, const Wanted& wanted, size_t count, int width) {
  require(given.size() == (wanted.through ? 1 : count), "there are too many inputs, or too few");
  for (const mx::array& input : given)
    require(input.ndim() >= 1 && tokens_of(input) == tokens_of(given[0]), "the inputs disagree about the tokens");
  if (!wanted.through) return;
  require(wanted.through->in.size() == count, "there are too many projections, or too few");
  for (const auto& chain : wanted.through->in) {
    int columns = given[0].shape(-1);
    for (const auto& weights : chain) {
      require(weights->matrix().columns == columns, "x and the projections disagree about the width");
      columns = weights->matrix().rows;
    }
    require(!chain.empty(), "an input has no projection");
  }
  require(wanted.through->out->matrix().columns == width, "the last projection does not fit the heads");
}

std::vector<mx::array> over_states(const char* name, std::vector<mx::array> inputs, const std::vector<State>& states,
                                   int width, Wanted wanted, Run run, mx::StreamOrDevice s) {
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  const int tokens = tokens_of(inputs[0]), slots = states[0].array.ndim() > 0 ? states[0].array.shape(0) : 0;
  check_pieces(wanted.pieces, tokens, slots);
  require(wanted.earlier >= 0, "there is no state after the last one");
  mx::Shape shape = inputs[0].shape();
  shape.back() = wanted.through ? wanted.through->out->matrix().rows : width;
  std::vector<mx::Shape> shapes{shape};
  std::vector<size_t> row_sizes;
  for (mx::array& input : inputs) input = mx::astype(input, mx::float32, stream);
  for (const auto& [array, row] : states) {
    mx::Shape whole = row;
    whole.insert(whole.begin(), slots);
    require(array.dtype() == mx::float32 && array.shape() == whole, "the states do not fit");
    shapes.push_back(whole);
    row_sizes.push_back(array.size() / std::max(slots, 1));
    inputs.push_back(array);
  }
  for (size_t i = 0; wanted.earlier > 0 && i < states.size(); i++) {
    mx::Shape before = states[i].row;
    before.insert(before.begin(), {wanted.earlier, static_cast<int>(wanted.pieces.size())});
    shapes.push_back(before);
  }
  const std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  Call call{std::move(run), std::move(wanted), tokens, width, std::move(row_sizes)};
  return mx::array::make_arrays(std::move(shapes), dtypes, std::make_shared<OverStates>(stream, name, std::move(call)),
                                inputs);
}

mx::Shape tail(const Taps& taps) { return {taps.kept(), taps.channels()}; }

}  // namespace

std::vector<mx::array> convolve(std::shared_ptr<const Convolution> layer, const std::vector<mx::array>& given,
                                const mx::array& tails, Wanted wanted, mx::StreamOrDevice s) {
  check_given(given, wanted, 1, layer->channels());
  require(width_of(given, wanted, 0) == layer->width(), "x has the wrong width");
  auto run = [layer](const Reads& own, const std::vector<Piece>& pieces, float* y, const Writes& states) {
    layer->run(own[0], pieces, states[0], y);
  };
  return over_states("IngotConvolution", given, {{tails, tail(layer->taps())}}, layer->channels(), std::move(wanted),
                     std::move(run), s);
}

std::vector<mx::array> gated_delta(std::shared_ptr<const GatedDelta> layer, const std::vector<mx::array>& given,
                                   const mx::array& tails, const mx::array& states, Wanted wanted, mx::StreamOrDevice s) {
  const DeltaShape& shape = layer->shape();
  check_given(given, wanted, 6, layer->width());
  std::vector<size_t> widths;
  for (size_t i = 0; i < 6; i++) widths.push_back(width_of(given, wanted, i));
  auto inputs = [widths](const Reads& own) {
    auto rows = [&](size_t i) { return TokenRows{own[i], widths[i]}; };
    return DeltaInputs{rows(0), rows(1), rows(2), rows(3), rows(4), rows(5)};
  };
  require(layer->fits(inputs(Reads(6))), "the inputs are too narrow for the heads");
  auto run = [layer, inputs](const Reads& own, const std::vector<Piece>& pieces, float* y, const Writes& states) {
    layer->run(inputs(own), pieces, states[0], states[1], y);
  };
  return over_states("IngotGatedDelta", given,
                     {{tails, tail(layer->taps())}, {states, {shape.value_heads, shape.value_size, shape.key_size}}},
                     layer->width(), std::move(wanted), std::move(run), s);
}

std::vector<mx::array> scan(std::shared_ptr<const Scan> layer, const std::vector<mx::array>& given,
                            const mx::array& tails, const mx::array& states, Wanted wanted, mx::StreamOrDevice s) {
  const ScanShape& shape = layer->shape();
  check_given(given, wanted, 1, layer->inner());
  require(width_of(given, wanted, 0) == layer->width(), "x has the wrong width");
  auto run = [layer, tokens = tokens_of(given[0])](const Reads& own, const std::vector<Piece>& pieces, float* y,
                                                   const Writes& states) {
    layer->run(own[0], tokens, pieces, states[0], states[1], y);
  };
  return over_states("IngotScan", given,
                     {{tails, tail(layer->taps())}, {states, {shape.heads, shape.head_size, shape.state_size}}},
                     layer->inner(), std::move(wanted), std::move(run), s);
}

}  // namespace ingot
