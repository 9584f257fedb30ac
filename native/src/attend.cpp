#include "attend.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "choice.h"
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

constexpr int kTileRows = 192;  // queries times heads that share keys, of one task
constexpr int kMany = 48;       // of a span's, from which on they are taken in register tiles where there are any

// Whether rows meet keys in register tiles (Wide), not in float32.
bool takes_tiles(const Heads& how, const Span& span) {
  return may_go_wide() && span.count * (how.heads / how.kv_heads) >= kMany;
}

// What several tasks find for the same queries, each in one stretch of keys. The last of them merges it.
struct Split {
  Split(Stretches stretches, int rows, int dim)
      : stretches(stretches), left(count()), room(count() * Found::size(rows, dim)) {}
  int count() const { return stretches.last - stretches.first + 1; }

  Stretches stretches;
  std::atomic<int> left;
  Room<float> room;
};

// Some queries of the heads that share keys.
struct Task {
  const Span* span;
  int kv_head, first, count;
  bool in_tiles;
  Split* split = nullptr;
  int stretch = 0;  // where there is a split
};

int seen_by(const Task& task) { return task.span->place + task.first + task.count; }

Sight sight_of(const Heads& how, const Task& task, int window) {
  // A window that is wider than all there is shows no more than that.
  return {how.size, how.scale, how.cap, std::min(window, seen_by(task))};
}

// How the work is shared out.
struct Plan {
  Plan(const Heads& how, const Spans& spans, int window) {
    const int most = std::max(1, kTileRows * how.kv_heads / how.heads);
    for (const Span& span : spans) {
      const bool in_tiles = takes_tiles(how, span) && spans.table(span).coded.empty();
      for (int first = 0, count; first < span.count; first += count) {
        count = std::min(most, span.count - first);
        for (int head = 0; head < how.kv_heads; head++) tasks.push_back({&span, head, first, count, in_tiles});
      }
    }
    // The latest queries see the most keys: they go first, so that the threads end together.
    std::reverse(tasks.begin(), tasks.end());
    // Those of one sequence read each other's keys.
    apart = spans.apart() && tasks.size() == spans.size() * how.kv_heads;
    if (static_cast<int>(tasks.size()) < 2 * Pool::shared().threads()) split(how, window);
  }

  std::vector<Task> tasks;
  bool apart;  // no task reads a key that another one may have to put there

 private:
  // So few tasks would leave threads without work.
  void split(const Heads& how, int window) {
    std::vector<Task> parts;
    for (const Task& task : tasks) {
      const Stretches stretches(sight_of(how, task, window), task.count, seen_by(task));
      if (task.in_tiles || stretches.first == stretches.last) {
        parts.push_back(task);
        continue;
      }
      apart = false;
      splits.push_back(std::make_unique<Split>(stretches, task.count * how.heads / how.kv_heads, how.size));
      for (int stretch = stretches.first; stretch <= stretches.last; stretch++) {
        parts.push_back(task);
        parts.back().split = splits.back().get();
        parts.back().stretch = stretch;
      }
    }
    tasks = std::move(parts);
  }

  std::vector<std::unique_ptr<Split>> splits;
};

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

States::States(mx::array& keys, mx::array& values)
    : keys(keys.data<char>()), values(values.data<char>()), kv_heads(keys.shape(1)), page(keys.shape(2)), size(keys.shape(3)),
      halves(holds_halves(keys, values)) {}

States::States(mx::array& keys, mx::array& values, const mx::array& coded, const CodedForm& form) : States(keys, values) {
  this->coded = coded.data<uint8_t>();
  layout = &form.layout();
}

Coded States::coded_pages(const Table& table, int kv_head) const {
  if (layout == nullptr) return {nullptr, nullptr, nullptr, 0, 0};
  return {layout, coded + kv_head * layout->head, table.coded.data(), static_cast<int>(table.coded.size()), kv_heads * layout->head};
}

template <class Number>
Paged<Number> States::paged(const Table& table, int kv_head) const {
  const size_t own = static_cast<size_t>(page) * size, from = kv_head * own;
  const int bits = std::countr_zero(static_cast<unsigned>(page));
  return {static_cast<const Number*>(keys) + from, static_cast<const Number*>(values) + from, table.pages.data(),
          table.forgotten, bits, size, kv_heads * own};
}

template Paged<float> States::paged(const Table& table, int kv_head) const;
template Paged<Half> States::paged(const Table& table, int kv_head) const;

void States::put(const Table& table, int place, int kv_head, const float* key, const float* value) const {
  const size_t in_page = static_cast<size_t>(kv_head) * page + place % page;
  const size_t at = (static_cast<size_t>(table.pages[place / page - table.forgotten]) * kv_heads * page + in_page) * size;
  auto put = [&](void* state, const float* x) {
    if (halves)
      floats().halve(x, size, static_cast<Half*>(state) + at);
    else
      std::memcpy(static_cast<float*>(state) + at, x, sizeof(float) * size);
  };
  put(keys, key);
  put(values, value);
}

CodedForm::CodedForm(int size, bool halves, std::optional<size_t> centre, size_t head_bytes, Side keys, Side values)
    : keys_(std::move(keys)), values_(std::move(values)) {
  require(size > 0 && size <= kLargestCoded, "heads of coded pages have at most 512 numbers");
  layout_ = {size, halves, centre.has_value(), centre.value_or(0), head_bytes, {}, {}};
  layout_.keys = side(keys_);
  layout_.values = side(values_);
}

CodedSide CodedForm::side(Side& given) {
  auto& [bits, group, codes, scales, levels, signs] = given;
  const int size = layout_.size, most = 1 << std::max(bits, 0);
  require(bits >= 0 && (group > 0 ? (bits == 4 || bits == 8) && size % group == 0 && size % 8 == 0 : bits <= 4),
          "codes have 1 to 4 bits, and steps 4 or 8");
  const bool rotated = bits > 0 && group == 0;
  require(!rotated || (std::has_single_bit(static_cast<unsigned>(size)) && size >= 16 && signs.size() == static_cast<size_t>(size) &&
                       levels.size() == static_cast<size_t>(most)),
          "a rotated head has 16 to 512 numbers, a power of two, with a sign each and all levels");
  const size_t vectors = kKeyBlock, bytes = bits == 0 ? size * (layout_.halves ? 2 : 4) : size * bits / 8;
  require(codes + vectors * bytes <= layout_.head && scales + vectors * (group > 0 ? 4 * (size / group) : 2 * rotated) <= layout_.head,
          "a page ends before its codes do");
  levels.resize(16);
  return {bits, group, codes, scales, levels.data(), signs.data()};
}

void CodedStates::check(const mx::array& keys, const Spans& spans) const {
  const CodedLayout& layout = form->layout();
  require(pages.dtype() == mx::uint8 && pages.ndim() == 4 && pages.shape(1) == keys.shape(1) && pages.shape(2) == 1 &&
              static_cast<size_t>(pages.shape(3)) == layout.head,
          "coded pages are bytes [pages, kv_heads, 1, bytes]");
  require(keys.shape(3) == layout.size && (keys.dtype() == mx::float16) == layout.halves, "coded pages are of other states");
  spans.check_coded(pages.shape(0));
}

bool holds_halves(const mx::array& keys, const mx::array& values) {
  require(keys.dtype() == values.dtype() && (keys.dtype() == mx::float32 || keys.dtype() == mx::float16),
          "the states must be alike, and float32 or float16");
  return keys.dtype() == mx::float16;
}

namespace {

void prepare_all(const Heads& how, const Spans& spans, const Prepare& prepare) {
  std::vector<int> tokens;
  for (const Span& span : spans)
    for (int i = 0; i < span.count; i++) tokens.push_back(span.first + i);
  each_token(static_cast<int>(tokens.size()), [&](int i) {
    for (int head = 0; head < how.kv_heads; head++) prepare(tokens[i], head);
  });
}

float* own_room(size_t size) {
  static thread_local Room<float> room;
  return room.at_least(size);
}

// One task, with keys and values of either kind.
template <class Number>
class Attending {
 public:
  Attending(const Heads& how, const Task& task, int window, const float* q, const Paged<Number>& paged, const Coded& coded, float* out)
      : how_(how), task_(task), sight_(sight_of(how, task, window)), group_(how.heads / how.kv_heads), seen_(seen_by(task)),
        stride_(static_cast<size_t>(how.heads) * how.size), sinks_(how.sinks ? how.sinks + task.kv_head * group_ : nullptr),
        paged_(paged), coded_(coded) {
    const size_t at = (task.span->first + task.first) * stride_ + static_cast<size_t>(task.kv_head) * group_ * how.size;
    q_ = q + at;
    out_ = out + at;
  }

  void run() const {
    if (task_.in_tiles) return in_tiles(*wide());
    const size_t size = Found::size(rows(), how_.size), scratch = attend_scratch(rows(), how_.size);
    float* room = own_room(2 * size + scratch);
    Found all(rows(), how_.size, room);
    if (task_.split == nullptr) {
      const Stretches stretches(sight_, task_.count, seen_);
      begin(all);
      for (int stretch = stretches.first; stretch <= stretches.last; stretch++) {
        const Found found(rows(), how_.size, room + size);
        const bool again = stretch > stretches.first && is_coded(stretch) == is_coded(stretch - 1);
        find(again ? nullptr : q_, stretch, room + 2 * size, found);
        floats().merge(all, found);
      }
      return give(all);
    }
    Split& split = *task_.split;
    auto part = [&](int i) { return Found(rows(), how_.size, split.room.data() + i * size); };
    find(q_, task_.stretch, room + 2 * size, part(task_.stretch - split.stretches.first));
    if (split.left.fetch_sub(1) > 1) return;
    begin(all);
    for (int i = 0; i < split.count(); i++) floats().merge(all, part(i));
    give(all);
  }

 private:
  int rows() const { return task_.count * group_; }

  void in_tiles(const Wide& use) const {
    const auto attend = [&] {
      if constexpr (std::is_same_v<Number, Half>)
        return use.attend_halves;
      else
        return use.attend;
    }();
    attend(sight_, q_, task_.count, group_, stride_, paged_, seen_, sinks_, out_);
  }

  bool is_coded(int stretch) const { return stretch * kStretch < coded_.count * kKeyBlock; }

  void find_coded(const float* q, int stretch, float* scratch, Found found) const {
    const auto attend = [] {
      if constexpr (std::is_same_v<Number, Half>)
        return floats().attend_coded_halves;
      else
        return floats().attend_coded;
    }();
    attend(sight_, q, task_.count, group_, stride_, coded_, paged_, seen_, stretch, scratch, found);
  }

  void find(const float* q, int stretch, float* scratch, Found found) const {
    if (is_coded(stretch)) return find_coded(q, stretch, scratch, found);
    const auto attend = [this] {
      if constexpr (std::is_same_v<Number, Half>)
        return floats().attend_halves;
      else
        return floats().attend;
    }();
    attend(sight_, q, task_.count, group_, stride_, paged_, seen_, stretch, scratch, found);
  }

  // A sink is a score that takes its share of the weights and adds nothing.
  void begin(Found all) const {
    std::fill_n(all.sums, static_cast<size_t>(all.rows) * all.dim, 0.0f);
    for (int row = 0; row < all.rows; row++) {
      all.largest[row] = sinks_ ? sinks_[row % group_] : -std::numeric_limits<float>::infinity();
      all.total[row] = sinks_ ? 1.0f : 0.0f;
    }
  }

  void give(Found all) const {
    for (int row = 0; row < all.rows; row++) {
      float* to = out_ + row / group_ * stride_ + static_cast<size_t>(row % group_) * all.dim;
      const float inverse = 1.0f / all.total[row];
      for (int d = 0; d < all.dim; d++) to[d] = all.sums[static_cast<size_t>(row) * all.dim + d] * inverse;
    }
  }

  const Heads& how_;
  const Task& task_;
  const Sight sight_;
  const int group_, seen_;
  const size_t stride_;
  const float* sinks_;
  const Paged<Number> paged_;
  const Coded coded_;
  const float* q_;
  float* out_;
};

void attend_to_all(const Heads& how, const Spans& spans, int window, const float* q, const States& states, float* out,
                   const Prepare& prepare) {
  const Plan plan(how, spans, window);
  if (prepare && !plan.apart) prepare_all(how, spans, prepare);
  Pool::shared().each(static_cast<int>(plan.tasks.size()), [&](int index) {
    const Task& task = plan.tasks[index];
    // Here the threads need not wait for each other, which they do for longer than a step's few tokens take.
    if (prepare && plan.apart)
      for (int i = 0; i < task.span->count; i++) prepare(task.span->first + i, task.kv_head);
    const Table& table = spans.table(*task.span);
    const Coded coded = states.coded_pages(table, task.kv_head);
    if (states.halves)
      Attending<Half>(how, task, window, q, states.paged<Half>(table, task.kv_head), coded, out).run();
    else
      Attending<float>(how, task, window, q, states.paged<float>(table, task.kv_head), coded, out).run();
  });
}

}  // namespace

void attend(const Heads& how, const Spans& spans, int window, const float* q, const States& states, float* out,
            const Prepare& prepare) {
  if (!spans.choice()) return attend_to_all(how, spans, window, q, states, out, prepare);
  if (prepare) prepare_all(how, spans, prepare);
  const std::optional<Spans> chosen = chosen_pages(how, spans, q, states);
  attend_to_all(how, chosen ? *chosen : spans, window, q, states, out, nullptr);
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

void Attention::run(const float* q, const float* k, const float* v, int tokens, const Spans& spans, int window,
                    const States& states, float* out) const {
  const int heads = how_.heads, kv_heads = how_.kv_heads, size = how_.size, taken = gated_ ? 2 * size : size;
  const size_t width = static_cast<size_t>(heads) * size, kv_width = static_cast<size_t>(kv_heads) * size;
  Room<float> queries(tokens * width);
  const auto table = rotation_ ? rotation_->table(spans.positions()) : nullptr;
  each_token(tokens, [&](int token) {
    const Span* span = spans.owner(token);
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
      const size_t own = static_cast<size_t>(head) * size;
      const int place = span->place + token - span->first;
      states.put(spans.table(*span), place, head, scratch.data() + own, v + token * kv_width + own);
    }
  });
  attend(how_, spans, window, queries.data(), states, out);
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
  AttentionPrimitive(mx::Stream stream, std::shared_ptr<const Attention> attention, std::shared_ptr<const Spans> spans, int window,
                     std::shared_ptr<const CodedForm> form)
      : Primitive(stream), attention_(std::move(attention)), spans_(std::move(spans)), window_(window), form_(std::move(form)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    let_go(inputs, outputs);
    take_whole(encoder, inputs);
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    outputs[1].copy_shared_buffer(inputs[3]);
    outputs[2].copy_shared_buffer(inputs[4]);
    for (mx::array& output : outputs) encoder.set_output_array(output);
    const int tokens = static_cast<int>(outputs[0].size() / outputs[0].shape(-1));
    const States states = form_ ? States(outputs[1], outputs[2], inputs[5], *form_) : States(outputs[1], outputs[2]);
    encoder.dispatch([attention = attention_, form = form_, spans = spans_, window = window_, q = inputs[0].data<float>(), k = inputs[1].data<float>(),
                      v = inputs[2].data<float>(), out = outputs[0].data<float>(), tokens, states] {
      attention->run(q, k, v, tokens, *spans, window, states, out);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native.Attention runs on CPUs only");
  }

  const char* name() const override { return "IngotAttention"; }

 private:
  std::shared_ptr<const Attention> attention_;
  std::shared_ptr<const Spans> spans_;
  int window_;
  std::shared_ptr<const CodedForm> form_;
};

}  // namespace

std::vector<mx::array> run_attention(std::shared_ptr<const Attention> attention, const mx::array& q, const mx::array& k,
                                     const mx::array& v, const mx::array& keys, const mx::array& values,
                                     std::shared_ptr<const Spans> spans, int window, const std::optional<CodedStates>& coded,
                                     mx::StreamOrDevice s) {
  const Heads& how = attention->heads();
  const int width = attention->query_width(), kv_width = how.kv_heads * how.size;
  require(q.ndim() >= 2 && q.shape(-1) == width, "the queries have the wrong width");
  const size_t tokens = q.size() / width;
  require(k.size() == tokens * kv_width && v.size() == k.size(), "the keys or values have the wrong size");
  require(keys.ndim() == 4 && keys.shape(1) == how.kv_heads && keys.shape(3) == how.size && values.shape() == keys.shape(),
          "the states do not fit");
  holds_halves(keys, values);
  spans->check(static_cast<int>(tokens), keys.shape(), window);
  if (coded)
    coded->check(keys, *spans);
  else
    spans->check_coded(0);
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  auto plain = [&](const mx::array& x) { return mx::contiguous(mx::astype(x, mx::float32, stream), false, stream); };
  mx::Shape shape = q.shape();
  shape.back() = how.heads * how.size;
  std::vector<mx::array> inputs{plain(q), plain(k), plain(v), keys, values};
  if (coded) inputs.push_back(coded->pages);
  auto form = coded ? coded->form : nullptr;
  return mx::array::make_arrays(
      {shape, keys.shape(), values.shape()}, {mx::float32, keys.dtype(), values.dtype()},
      std::make_shared<AttentionPrimitive>(stream, std::move(attention), std::move(spans), window, std::move(form)), inputs);
}

}  // namespace ingot
