#include "attend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "floats.h"
#include "in_place.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "product.h"
#include "room.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr int kTileRows = 96;   // queries times heads that share keys, of one task
constexpr int kWideRows = 192;  // the same, where there are so many that all are taken at once
constexpr int kMany = 48;       // from which on they are

// Some queries of the heads that share keys.
struct Task {
  const Span* span;
  int kv_head, first, count;
  bool wide;
};

std::vector<Task> tasks_of(const Heads& how, const std::vector<Span>& spans) {
  const int group = how.heads / how.kv_heads;
  std::vector<Task> tasks;
  for (const Span& span : spans) {
    const bool wide = may_go_wide() && span.count * group >= kMany;
    const int block = std::max(1, (wide ? kWideRows : kTileRows) / group);
    for (int first = 0; first < span.count; first += block)
      for (int head = 0; head < how.kv_heads; head++)
        tasks.push_back({&span, head, first, std::min(block, span.count - first), wide});
  }
  // The latest queries see the most keys: they go first, so that the threads end together.
  std::reverse(tasks.begin(), tasks.end());
  return tasks;
}

void normed(const HeadNorm& norm, float* x, int heads, int size) {
  const Floats& use = floats();
  const int count = norm.whole ? 1 : heads, length = norm.whole ? heads * size : size;
  for (int head = 0; head < count; head++) {
    const float* weight = norm.weight.data() + (norm.length == length ? 0 : static_cast<size_t>(head) * size);
    float* own = x + static_cast<size_t>(head) * size;
    if (norm.centred)
      use.layer_norm(own, weight, nullptr, norm.eps, length, own);
    else
      use.rms_norm(own, weight, norm.eps, length, own);
  }
}

}  // namespace

void States::put(size_t at, const float* key, const float* value, int size) const {
  auto put = [&](void* state, const float* x) {
    if (halves)
      floats().halve(x, size, static_cast<Half*>(state) + at);
    else
      std::memcpy(static_cast<float*>(state) + at, x, sizeof(float) * size);
  };
  put(keys, key);
  put(values, value);
}

bool holds_halves(const mx::array& keys, const mx::array& values) {
  require(keys.dtype() == values.dtype() && (keys.dtype() == mx::float32 || keys.dtype() == mx::float16),
          "the states must be alike, and float32 or float16");
  return keys.dtype() == mx::float16;
}

namespace {

void prepare_all(const Heads& how, const std::vector<Span>& spans, const Prepare& prepare) {
  std::vector<int> tokens;
  for (const Span& span : spans)
    for (int i = 0; i < span.count; i++) tokens.push_back(span.first + i);
  each_token(static_cast<int>(tokens.size()), [&](int i) {
    for (int head = 0; head < how.kv_heads; head++) prepare(tokens[i], head);
  });
}

// The queries of one task, with keys and values of either kind.
struct Seen {
  const Sight& sight;
  const float* q;
  size_t stride;
  int keys;
  const float* sinks;
  float* out;
};

void attend_task(const Task& task, int group, const Seen& seen, const States& states, size_t from) {
  auto with = [&](auto* keys, auto* values, auto wide_attend, auto attend) {
    if (task.wide)
      return wide_attend(seen.sight, seen.q, task.count, group, seen.stride, keys + from, values + from, seen.keys, seen.sinks, seen.out);
    static thread_local std::vector<float> scratch;
    scratch.resize(std::max(scratch.size(), attend_scratch(task.count * group, seen.sight.dim)));
    attend(seen.sight, seen.q, task.count, group, seen.stride, keys + from, values + from, seen.keys, seen.sinks, scratch.data(), seen.out);
  };
  const Wide* use = wide();
  if (states.halves)
    with(static_cast<const Half*>(states.keys), static_cast<const Half*>(states.values), use ? use->attend_halves : nullptr,
         floats().attend_halves);
  else
    with(static_cast<const float*>(states.keys), static_cast<const float*>(states.values), use ? use->attend : nullptr,
         floats().attend);
}

}  // namespace

void attend(const Heads& how, const std::vector<Span>& spans, const float* q, const States& states, float* out,
            const Prepare& prepare) {
  const std::vector<Task> tasks = tasks_of(how, spans);
  // Tasks of one span read each other's keys. One that has it alone prepares for itself: so the threads need not wait for
  // each other, which they do for longer than a step's few tokens take.
  const bool alone = tasks.size() == spans.size() * how.kv_heads;
  if (prepare && !alone) prepare_all(how, spans, prepare);
  const int capacity = states.capacity;
  const int group = how.heads / how.kv_heads;
  const size_t stride = static_cast<size_t>(how.heads) * how.size;
  Pool::shared().each(static_cast<int>(tasks.size()), [&](int index) {
    const Task& task = tasks[index];
    const Span& span = *task.span;
    const size_t from = (static_cast<size_t>(span.slot) * how.kv_heads + task.kv_head) * capacity * how.size;
    const size_t at = (span.first + task.first) * stride + static_cast<size_t>(task.kv_head) * group * how.size;
    // A window that is wider than the states shows no more than they hold.
    const Sight sight{how.size, how.scale, how.cap, std::min(span.window, capacity), (span.start - span.place) % kKeyBlock};
    const int seen = span.place + task.first + task.count;
    const float* sinks = how.sinks ? how.sinks + task.kv_head * group : nullptr;
    if (prepare && alone)
      for (int token = span.first; token < span.first + span.count; token++) prepare(token, task.kv_head);
    attend_task(task, group, {sight, q + at, stride, seen, sinks, out + at}, states, from);
  });
}

Attention::Attention(Heads how, const std::optional<mx::array>& sinks, std::optional<HeadNorm> q_norm,
                     std::optional<HeadNorm> k_norm, std::shared_ptr<const Rotation> rotation, bool gated)
    : how_(how), q_norm_(std::move(q_norm)), k_norm_(std::move(k_norm)), rotation_(std::move(rotation)), gated_(gated) {
  require(how.heads > 0 && how.kv_heads > 0 && how.heads % how.kv_heads == 0, "heads must come in equal groups");
  require(how.size > 0 && how.cap >= 0, "heads need a size, and a cap is not negative");
  require(!rotation_ || rotation_->dims() <= how.size, "more dims are turned than a head has");
  auto fits = [&](const std::optional<HeadNorm>& norm, int heads) {
    return !norm || norm->length == heads * how.size || (!norm->whole && norm->length == how.size);
  };
  require(fits(q_norm_, how.heads) && fits(k_norm_, how.kv_heads), "a norm's weight does not fit the heads");
  if (sinks) {
    sinks_.emplace(*sinks, how.heads);
    how_.sinks = sinks_->data();
  }
}

void Attention::run(const float* q, const float* k, const float* v, int tokens, const std::vector<Span>& spans,
                    const States& states, float* out) const {
  const int heads = how_.heads, kv_heads = how_.kv_heads, size = how_.size, taken = gated_ ? 2 * size : size;
  const size_t width = static_cast<size_t>(heads) * size, kv_width = static_cast<size_t>(kv_heads) * size;
  Room<float> queries(tokens * width);
  const auto table = rotation_ ? rotation_->table(spans, tokens) : nullptr;
  std::vector<const Span*> owners(tokens);
  for (const Span& span : spans) std::fill_n(owners.begin() + span.first, span.count, &span);
  each_token(tokens, [&](int token) {
    const Span* span = owners[token];
    if (span == nullptr) {
      std::fill_n(out + token * width, width, 0.0f);
      return;
    }
    float* own = queries.data() + token * width;
    for (int head = 0; head < heads; head++)
      std::memcpy(own + static_cast<size_t>(head) * size, q + (static_cast<size_t>(token) * heads + head) * taken, sizeof(float) * size);
    if (q_norm_) normed(*q_norm_, own, heads, size);
    static thread_local std::vector<float> scratch;
    scratch.resize(std::max(scratch.size(), kv_width));
    std::memcpy(scratch.data(), k + token * kv_width, sizeof(float) * kv_width);
    if (k_norm_) normed(*k_norm_, scratch.data(), kv_heads, size);
    if (table) {
      for (int head = 0; head < heads; head++) rotation_->turn(own + static_cast<size_t>(head) * size, *table, token);
      for (int head = 0; head < kv_heads; head++)
        rotation_->turn(scratch.data() + static_cast<size_t>(head) * size, *table, token);
    }
    for (int head = 0; head < kv_heads; head++) {
      const int place = span->place + token - span->first;
      const size_t to = ((static_cast<size_t>(span->slot) * kv_heads + head) * states.capacity + place) * size;
      states.put(to, scratch.data() + static_cast<size_t>(head) * size, v + token * kv_width + static_cast<size_t>(head) * size, size);
    }
  });
  attend(how_, spans, queries.data(), states, out);
  if (!gated_) return;
  each_token(tokens, [&](int token) {
    for (int head = 0; head < heads; head++) {
      float* own = out + token * width + static_cast<size_t>(head) * size;
      floats().gate(Gate::sigmoid, q + (static_cast<size_t>(token) * heads + head) * taken + size, own, size, own);
    }
  });
}

namespace {

class AttentionPrimitive : public mx::Primitive {
 public:
  AttentionPrimitive(mx::Stream stream, std::shared_ptr<const Attention> attention, std::vector<Span> spans)
      : Primitive(stream), attention_(std::move(attention)), spans_(std::move(spans)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    let_go(inputs, outputs);
    take_whole(encoder, inputs);
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    outputs[1].copy_shared_buffer(inputs[3]);
    outputs[2].copy_shared_buffer(inputs[4]);
    for (mx::array& output : outputs) encoder.set_output_array(output);
    const int tokens = static_cast<int>(outputs[0].size() / outputs[0].shape(-1));
    const States states{outputs[1].data<char>(), outputs[2].data<char>(), outputs[1].shape(2), holds_halves(outputs[1], outputs[2])};
    encoder.dispatch([attention = attention_, spans = spans_, q = inputs[0].data<float>(), k = inputs[1].data<float>(),
                      v = inputs[2].data<float>(), out = outputs[0].data<float>(), tokens, states] {
      attention->run(q, k, v, tokens, spans, states, out);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native.Attention runs on CPUs only");
  }

  const char* name() const override { return "IngotAttention"; }

 private:
  std::shared_ptr<const Attention> attention_;
  std::vector<Span> spans_;
};

void check_spans(const std::vector<Span>& spans, int tokens, const mx::Shape& states) {
  int end = 0;
  for (const Span& span : spans) {
    require(span.first >= end && span.count > 0 && span.count <= tokens - span.first, "spans must follow one another");
    require(span.slot >= 0 && span.slot < states[0] && span.place >= 0 && span.start >= span.place &&
                span.count <= states[2] - span.place && span.count <= kFarthest - span.start,
            "a span does not fit in the states");
    require(span.window >= 0, "a window is not negative");
    end = span.first + span.count;
  }
}

}  // namespace

std::vector<mx::array> run_attention(std::shared_ptr<const Attention> attention, const mx::array& q, const mx::array& k,
                                     const mx::array& v, const mx::array& keys, const mx::array& values,
                                     std::vector<Span> spans, mx::StreamOrDevice s) {
  const Heads& how = attention->heads();
  const int width = attention->query_width(), kv_width = how.kv_heads * how.size;
  require(q.ndim() >= 2 && q.shape(-1) == width, "the queries have the wrong width");
  const size_t tokens = q.size() / width;
  require(k.size() == tokens * kv_width && v.size() == k.size(), "the keys or values have the wrong size");
  require(keys.ndim() == 4 && keys.shape(1) == how.kv_heads && keys.shape(3) == how.size && values.shape() == keys.shape(),
          "the states do not fit");
  holds_halves(keys, values);
  check_spans(spans, static_cast<int>(tokens), keys.shape());
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  auto plain = [&](const mx::array& x) { return mx::contiguous(mx::astype(x, mx::float32, stream), false, stream); };
  mx::Shape shape = q.shape();
  shape.back() = how.heads * how.size;
  return mx::array::make_arrays({shape, keys.shape(), values.shape()}, {mx::float32, keys.dtype(), values.dtype()},
                                std::make_shared<AttentionPrimitive>(stream, std::move(attention), std::move(spans)),
                                {plain(q), plain(k), plain(v), keys, values});
}

}  // namespace ingot
