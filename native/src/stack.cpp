#include "stack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "attend.h"
#include "floats.h"
#include "in_place.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"

namespace ingot {
namespace mx = mlx::core;

// What one layer leaves for the next step; made once for all layers.
struct Stack::Work {
  Work(const StackShape& shape, int tokens, const Spans& spans)
      : tokens(tokens), spans(spans), q(size(tokens, shape.heads * shape.head_dim)), attended(size(tokens, shape.heads * shape.head_dim)),
        k(size(tokens, shape.kv_heads * shape.head_dim)), v(size(tokens, shape.kv_heads * shape.head_dim)) {}

  static size_t size(int a, int b) { return static_cast<size_t>(a) * b; }

  int tokens;
  const Spans& spans;
  Room<float> q, attended, k, v;
  std::shared_ptr<const Rotation::Table> turns;
};

Stack::Stack(StackShape shape, std::shared_ptr<const Rotation> rotation) : shape_(shape), rotation_(std::move(rotation)) {
  require(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, "heads must come in equal groups");
  require(rotation_->dims() <= shape.head_dim, "more is turned than a head has");
}

void Stack::add(StackLayer layer) {
  const int hidden = layer.q.matrix().columns, attention = shape_.heads * shape_.head_dim;
  const int kv = shape_.kv_heads * shape_.head_dim;
  auto fits = [](const Weights& w, int rows, int columns) {
    return w.matrix().rows == rows && w.matrix().columns == columns;
  };
  const int inner = layer.gate.matrix().rows;
  require(fits(layer.q, attention, hidden) && fits(layer.k, kv, hidden) && fits(layer.v, kv, hidden) &&
              fits(layer.o, hidden, attention) && fits(layer.gate, inner, hidden) && fits(layer.up, inner, hidden) &&
              fits(layer.down, hidden, inner),
          "the matrices of a layer do not fit together");
  require(layers_.empty() || (hidden == this->hidden() && inner == layers_[0].gate.matrix().rows),
          "the layers do not fit together");
  for (const Weights* w : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
    packed_ = packed_ && w->matrix().is_packed();
    const int group = packed_ ? w->matrix().packed.group : 0;
    group_ = group_.value_or(group) == group ? group : 0;
  }
  layers_.push_back(std::move(layer));
}

void Stack::run(float* x, int tokens, const Spans& spans, const std::vector<States>& states) const {
  Work work(shape_, tokens, spans);
  work.turns = rotation_->table(spans.positions());
  const int width = hidden(), attention = shape_.heads * shape_.head_dim, inner = layers_[0].gate.matrix().rows;
  auto with = [&](const auto& rows) {
    auto normed = rows(width), attended = rows(attention), gated = rows(inner);
    run_packed(normed, attended, gated, x, work, states);
  };
  if (const Wide* use = packed_ ? wide_for(tokens) : nullptr)
    with([&](int columns) { return Rounded(*use, tokens, columns); });
  else if (*group_ != 0)
    with([&](int columns) { return QuantisedRows(tokens, columns, *group_); });
  else
    run_plain(x, work, states);
}

void Stack::run_plain(float* x, Work& work, const std::vector<States>& states) const {
  const int tokens = work.tokens, width = hidden(), inner = layers_[0].gate.matrix().rows;
  Room<float> normed(Work::size(tokens, width)), out(Work::size(tokens, width));
  Room<float> gate(Work::size(tokens, inner)), up(Work::size(tokens, inner));
  const Floats& use = floats();
  auto row = [width](float* rows, int token) { return rows + Work::size(token, width); };
  for (size_t index = 0; index < layers_.size(); index++) {
    const StackLayer& layer = layers_[index];
    each_token(tokens, [&](int token) {
      if (index > 0) use.add(row(x, token), row(out.data(), token), width);
      use.rms_norm(row(x, token), layer.attention_norm.data(), shape_.eps, width, row(normed.data(), token));
    });
    multiply({{&layer.q.matrix(), work.q.data()}, {&layer.k.matrix(), work.k.data()}, {&layer.v.matrix(), work.v.data()}},
             normed.data(), tokens);
    attend(layer, work, states[index]);
    multiply({{&layer.o.matrix(), out.data()}}, work.attended.data(), tokens);
    each_token(tokens, [&](int token) {
      use.add(row(x, token), row(out.data(), token), width);
      use.rms_norm(row(x, token), layer.mlp_norm.data(), shape_.eps, width, row(normed.data(), token));
    });
    multiply({{&layer.gate.matrix(), gate.data()}, {&layer.up.matrix(), up.data()}}, normed.data(), tokens);
    each_token(tokens, [&](int token) {
      use.swiglu(gate.data() + Work::size(token, inner), up.data() + Work::size(token, inner), inner);
    });
    multiply({{&layer.down.matrix(), out.data()}}, gate.data(), tokens);
  }
  each_token(tokens, [&](int token) { use.add(row(x, token), row(out.data(), token), width); });
}

namespace {

// x through the gated half of an MLP.
void gate_into(const StackLayer& layer, const Rounded& x, Rounded& y, Room<float>&) {
  multiply_gated(layer.gate.matrix(), layer.up.matrix(), x, y);
}

void gate_into(const StackLayer& layer, const QuantisedRows& x, QuantisedRows& y, Room<float>& room) {
  float* gated = room.at_least(static_cast<size_t>(y.count) * y.columns);
  multiply_gated(layer.gate.matrix(), layer.up.matrix(), x, gated);
  y.clear();
  each_token(y.count, [&](int token) { y.put(token, gated + static_cast<size_t>(token) * y.columns); });
}

}  // namespace

// What lies between two products is rounded where it is made, and what a product adds is added by it: each time that all
// threads wait for each other, or that rows go through memory once more, takes as long as a product.
template <class Rows>
void Stack::run_packed(Rows& normed, Rows& attended, Rows& inner, float* x, Work& work,
                       const std::vector<States>& states) const {
  const int tokens = work.tokens, width = hidden(), attention = shape_.heads * shape_.head_dim;
  Room<float> gated;
  auto norm = [&](const Vector& weight) {
    normed.clear();
    each_token(tokens, [&](int token) {
      static thread_local Room<float> room;
      float* row = room.at_least(width);
      floats().rms_norm(x + Work::size(token, width), weight.data(), shape_.eps, width, row);
      normed.put(token, row);
    });
  };
  for (size_t index = 0; index < layers_.size(); index++) {
    const StackLayer& layer = layers_[index];
    norm(layer.attention_norm);
    multiply({{&layer.q.matrix(), work.q.data()}, {&layer.k.matrix(), work.k.data()}, {&layer.v.matrix(), work.v.data()}},
             normed);
    attend(layer, work, states[index]);
    attended.clear();
    each_token(tokens, [&](int token) { attended.put(token, work.attended.data() + Work::size(token, attention)); });
    multiply({{&layer.o.matrix(), x}}, attended, true);
    norm(layer.mlp_norm);
    gate_into(layer, normed, inner, gated);
    multiply({{&layer.down.matrix(), x}}, inner, true);
  }
}

void Stack::attend(const StackLayer& layer, Work& work, const States& states) const {
  const Floats& use = floats();
  const int dim = shape_.head_dim, group = shape_.heads / shape_.kv_heads;
  const size_t q_width = Work::size(shape_.heads, dim), kv_width = Work::size(shape_.kv_heads, dim);
  auto prepared = [&](float* head, const std::optional<Vector>& norm, int token) {
    if (norm) use.rms_norm(head, norm->data(), shape_.eps, dim, head);
    rotation_->turn(head, *work.turns, token);
  };
  auto prepare = [&](int token, int head) {
    float* q = work.q.data() + token * q_width + Work::size(head * group, dim);
    for (int i = 0; i < group; i++) prepared(q + Work::size(i, dim), layer.q_norm, token);
    const size_t own = token * kv_width + Work::size(head, dim);
    prepared(work.k.data() + own, layer.k_norm, token);
    const Span& span = *work.spans.owner(token);
    const int place = span.place + token - span.first;
    states.put(work.spans.table(span), place, head, work.k.data() + own, work.v.data() + own);
  };
  const Heads how{shape_.heads, shape_.kv_heads, dim, shape_.scale};
  ingot::attend(how, work.spans, 0, work.q.data(), states, work.attended.data(), prepare);
}

namespace {

class StackPrimitive : public mx::Primitive {
 public:
  // `forms` are those of the layers' coded pages, or none.
  StackPrimitive(mx::Stream stream, std::shared_ptr<const Stack> stack, std::shared_ptr<const Spans> spans,
                 std::vector<std::shared_ptr<const CodedForm>> forms)
      : Primitive(stream), stack_(std::move(stack)), spans_(std::move(spans)), forms_(std::move(forms)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    let_go(inputs, outputs);
    take_whole(encoder, inputs);
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    for (size_t i = 1; i < outputs.size(); i++) outputs[i].copy_shared_buffer(inputs[i]);
    for (mx::array& output : outputs) encoder.set_output_array(output);
    const size_t layers = stack_->size();
    std::vector<States> states;
    for (size_t i = 0; i < layers; i++) {
      mx::array &keys = outputs[1 + i], &values = outputs[1 + layers + i];
      states.push_back(forms_.empty() ? States(keys, values) : States(keys, values, inputs[1 + 2 * layers + i], *forms_[i]));
    }
    const int tokens = static_cast<int>(outputs[0].size() / outputs[0].shape(-1));
    encoder.dispatch([stack = stack_, forms = forms_, spans = spans_, from = inputs[0].data<float>(), x = outputs[0].data<float>(),
                      bytes = outputs[0].nbytes(), tokens, states = std::move(states)] {
      std::memcpy(x, from, bytes);
      stack->run(x, tokens, *spans, states);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native.Stack runs on CPUs only");
  }

  const char* name() const override { return "IngotStack"; }

 private:
  std::shared_ptr<const Stack> stack_;
  std::shared_ptr<const Spans> spans_;
  std::vector<std::shared_ptr<const CodedForm>> forms_;
};

}  // namespace

std::vector<mx::array> run_stack(std::shared_ptr<const Stack> stack, const mx::array& x, const std::vector<mx::array>& keys,
                                 const std::vector<mx::array>& values, std::shared_ptr<const Spans> spans,
                                 const std::vector<CodedStates>& coded, mx::StreamOrDevice s) {
  const StackShape& shape = stack->shape();
  const size_t layers = stack->size();
  require(layers > 0, "the stack has no layers");
  require(keys.size() == layers && values.size() == layers, "there must be keys and values for each layer");
  require(x.ndim() >= 2 && x.shape(-1) == stack->hidden(), "x has the wrong width");
  const mx::Shape& states = keys[0].shape();
  require(keys[0].ndim() == 4 && states[1] == shape.kv_heads && states[3] == shape.head_dim, "the states do not fit");
  for (size_t i = 0; i < layers; i++) {
    holds_halves(keys[i], values[i]);
    require(keys[i].shape() == states && values[i].shape() == states, "the states must be alike");
  }
  const int tokens = static_cast<int>(x.size() / x.shape(-1));
  spans->check(tokens, states, 0);
  if (coded.empty()) spans->check_coded(0);
  require(coded.empty() || coded.size() == layers, "there must be coded pages for each layer, or for none");
  for (size_t i = 0; i < coded.size(); i++) coded[i].check(keys[i], *spans);
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  std::vector<mx::array> inputs{mx::contiguous(mx::astype(x, mx::float32, stream), false, stream)};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& input : inputs) {
    shapes.push_back(input.shape());
    dtypes.push_back(input.dtype());
  }
  std::vector<std::shared_ptr<const CodedForm>> forms;
  for (const CodedStates& own : coded) {
    inputs.push_back(own.pages);
    forms.push_back(own.form);
  }
  return mx::array::make_arrays(
      std::move(shapes), std::move(dtypes),
      std::make_shared<StackPrimitive>(stream, std::move(stack), std::move(spans), std::move(forms)), inputs);
}

}  // namespace ingot
