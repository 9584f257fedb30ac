#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "floats.h"
#include "pool.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr int kMostTaps = 64;          // see convolve() in recurrence.cpp
constexpr int kChannels = 128;         // of a convolution that are one task
constexpr float kUnitEps = 1e-6f;      // of the norms of queries and keys
constexpr int kTasksPerThread = 2;

size_t size(int a, int b) { return static_cast<size_t>(a) * b; }

// Memory that a thread keeps from task to task.
float* scratch(size_t floats) {
  static thread_local std::vector<float> held;
  if (held.size() < floats) held.resize(floats);
  return held.data();
}

float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

mx::array transposed(const mx::array& weight) {
  require(weight.ndim() == 2 || (weight.ndim() == 3 && weight.shape(2) == 1), "a filter is [channels, taps]");
  return mx::transpose(mx::reshape(weight, {weight.shape(0), weight.shape(1)}));
}

// What the next piece of a sequence needs of the last tokens; row(token, out) gives what was convolved of one.
template <class Row>
void renew(float* tail, const Taps& taps, const Piece& piece, const Row& row) {
  const int kept = taps.kept(), channels = taps.channels();
  if (piece.start == 0) std::fill(tail, tail + taps.tail_size(), 0.0f);
  const int old = std::max(0, kept - piece.count);
  std::memmove(tail, tail + size(kept - old, channels), sizeof(float) * size(old, channels));
  for (int i = old; i < kept; i++) row(piece.first + piece.count - (kept - i), tail + size(i, channels));
}

int column(const Columns& columns, int head, int in_group) {
  return columns.first + head / in_group * columns.group + head % in_group * columns.head;
}

}  // namespace

Taps::Taps(const mx::array& weight, const std::optional<mx::array>& bias)
    : channels_(weight.shape(0)), taps_(weight.shape(1)), weight_(mx::flatten(transposed(weight)), channels_ * taps_) {
  require(taps_ >= 2 && taps_ <= kMostTaps, "a filter has at least 2 taps and at most 64");
  if (bias) bias_.emplace(*bias, channels_);
}

Filter Taps::filter(int channel, bool silu) const {
  return {weight_.data() + channel, static_cast<size_t>(channels_), bias_ ? bias_->data() + channel : nullptr, taps_, silu};
}

Convolution::Convolution(const mx::array& weight, const std::optional<mx::array>& bias, bool silu, bool gated)
    : taps_(weight, bias), silu_(silu), gated_(gated) {}

void Convolution::run(const float* x, const std::vector<Piece>& pieces, float* tails, float* y) const {
  const int parts = (channels() + kChannels - 1) / kChannels;
  Pool::shared().each(static_cast<int>(pieces.size()) * parts, [&](int index) {
    const Piece& piece = pieces[index / parts];
    const int first = index % parts * kChannels;
    run(x, piece, first, std::min(kChannels, channels() - first), tails + piece.slot * taps_.tail_size() + first, y + first);
  });
}

void Convolution::run(const float* x, const Piece& piece, int first, int count, float* tail, float* y) const {
  const int kept = taps_.kept(), all = channels();
  float* rows = scratch(size(kept + kChunk, count));  // what is convolved, behind what came before
  for (int i = 0; i < kept; i++) {
    float* row = rows + size(i, count);
    if (piece.start == 0)
      std::fill(row, row + count, 0.0f);
    else
      std::memcpy(row, tail + size(i, all), sizeof(float) * count);
  }
  for (int done = 0; done < piece.count; done += kChunk) {
    const int tokens = std::min(kChunk, piece.count - done);
    for (int t = 0; t < tokens; t++) {
      const float* from = x + size(piece.first + done + t, width()) + first;
      float* row = rows + size(kept + t, count);
      if (gated_)
        for (int c = 0; c < count; c++) row[c] = from[c] * from[2 * all + c];
      else
        std::memcpy(row, from, sizeof(float) * count);
    }
    float* to = y + size(piece.first + done, all);
    recurrence().convolve({rows + size(kept, count), static_cast<size_t>(count), kept, nullptr, 0, tokens, count},
                          taps_.filter(first, silu_), to, all);
    for (int t = 0; gated_ && t < tokens; t++) {
      const float* gate = x + size(piece.first + done + t, width()) + all + first;
      for (int c = 0; c < count; c++) to[size(t, all) + c] *= gate[c];
    }
    std::memmove(rows, rows + size(tokens, count), sizeof(float) * size(kept, count));
  }
  for (int i = 0; i < kept; i++) std::memcpy(tail + size(i, all), rows + size(i, count), sizeof(float) * count);
}

// Some value heads of one piece that share a key.
struct GatedDelta::Task {
  const Piece* piece;
  int key_head, first, count;
};

GatedDelta::GatedDelta(DeltaShape shape, DeltaColumns columns, const mx::array& filter, const mx::array& a_log,
                       const mx::array& dt_bias, const mx::array& norm)
    : shape_(shape), columns_(columns), taps_(filter, std::nullopt), a_log_(a_log, shape.value_heads),
      dt_bias_(dt_bias, shape.value_heads * decays()), norm_(norm, shape.value_size) {
  require(shape.key_heads > 0 && shape.value_heads > 0 && shape.value_heads % shape.key_heads == 0 && shape.key_size > 0 &&
              shape.value_size > 0,
          "value heads must come in equal groups");
  require(taps_.channels() == 2 * shape.key_heads * shape.key_size + width(), "the filter does not fit the heads");
}

bool GatedDelta::fits(const DeltaInputs& inputs) const {
  const int in_group = shape_.value_heads / shape_.key_heads;
  auto within = [&](const Columns& columns, int heads, int group, int each, const TokenRows& rows) {
    return columns.first >= 0 && columns.head >= 0 && columns.group >= 0 &&
           static_cast<size_t>(column(columns, heads - 1, group) + each) <= rows.width;
  };
  return within(columns_.q, shape_.key_heads, 1, shape_.key_size, inputs.q) &&
         within(columns_.k, shape_.key_heads, 1, shape_.key_size, inputs.k) &&
         within(columns_.v, shape_.value_heads, in_group, shape_.value_size, inputs.v) &&
         within(columns_.z, shape_.value_heads, in_group, shape_.value_size, inputs.z) &&
         within(columns_.b, shape_.value_heads, in_group, 1, inputs.b) &&
         within(columns_.a, shape_.value_heads, in_group, decays(), inputs.a);
}

void GatedDelta::run(const DeltaInputs& in, const std::vector<Piece>& pieces, float* tails, float* states, float* y) const {
  const int in_group = shape_.value_heads / shape_.key_heads;
  const int groups = static_cast<int>(pieces.size()) * shape_.key_heads;
  // Heads of a group share queries and keys; where there are too few groups for the threads, each makes its own.
  const int share = groups >= Pool::shared().threads() * kTasksPerThread ? in_group : 1;
  std::vector<Task> tasks;
  for (const Piece& piece : pieces)
    for (int head = 0; head < shape_.value_heads; head += share) tasks.push_back({&piece, head / in_group, head, share});
  const size_t state_size = size(shape_.value_heads, shape_.value_size) * shape_.key_size;
  Pool::shared().each(static_cast<int>(tasks.size()), [&](int index) {
    const Task& task = tasks[index];
    run(in, task, tails + task.piece->slot * taps_.tail_size(), states + task.piece->slot * state_size, y);
  });
  const int key_dim = shape_.key_heads * shape_.key_size;
  Pool::shared().each(static_cast<int>(pieces.size()), [&](int index) {
    const Piece& piece = pieces[index];
    renew(tails + piece.slot * taps_.tail_size(), taps_, piece, [&](int token, float* out) {
      for (int head = 0; head < shape_.key_heads; head++) {
        float* to = out + size(head, shape_.key_size);
        std::memcpy(to, in.q.at(token, column(columns_.q, head, 1)), sizeof(float) * shape_.key_size);
        std::memcpy(to + key_dim, in.k.at(token, column(columns_.k, head, 1)), sizeof(float) * shape_.key_size);
      }
      for (int head = 0; head < shape_.value_heads; head++)
        std::memcpy(out + 2 * key_dim + size(head, shape_.value_size), in.v.at(token, column(columns_.v, head, in_group)),
                    sizeof(float) * shape_.value_size);
    });
  });
}

// What a head's rule takes of some tokens, and what it gives, in memory that a thread keeps from task to task.
struct GatedDelta::Chunk {
  Chunk(const DeltaShape& shape, int padded)
      : padded(padded), room(size((shape.decays_by_key ? 4 : 2) * kChunk + kStateRows, padded) +
                             size(2 * kChunk, shape.value_size) + 2 * kChunk) {
    float* at = scratch(room);
    if (padded > shape.key_size) std::fill(at, at + room, 0.0f);  // behind keys, where they are not whole vectors
    auto next = [&](size_t floats) { return std::exchange(at, at + floats); };
    q = next(size(kChunk, padded)), k = next(size(kChunk, padded)), spare = next(size(kStateRows, padded));
    v = next(size(kChunk, shape.value_size)), out = next(size(kChunk, shape.value_size)), beta = next(kChunk);
    decay = next(shape.decays_by_key ? size(kChunk, padded) : kChunk);
    decayed_k = shape.decays_by_key ? at : nullptr;
  }

  int count = 0;
  const int padded;
  const size_t room;
  float *q, *k, *spare, *v, *out, *beta, *decay, *decayed_k;
};

void GatedDelta::run(const DeltaInputs& in, const Task& task, const float* tail, float* state, float* y) const {
  const Recurrence& use = recurrence();
  const Piece& piece = *task.piece;
  const bool fresh = piece.start == 0;
  const int keys = shape_.key_size, values = shape_.value_size;
  const int in_group = shape_.value_heads / shape_.key_heads, key_dim = shape_.key_heads * keys;
  Chunk chunk(shape_, use.padded(keys));
  if (fresh)
    std::fill(state + size(task.first * values, keys), state + size((task.first + task.count) * values, keys), 0.0f);
  for (int done = 0; done < piece.count; done += kChunk) {
    const int count = chunk.count = std::min(kChunk, piece.count - done), begin = piece.first + done;
    auto convolve = [&](const TokenRows& rows, int from, int channel, int channels, float* to, int stride) {
      use.convolve({rows.at(begin, from), rows.width, done, fresh ? nullptr : tail + channel,
                    static_cast<size_t>(taps_.channels()), count, channels},
                   taps_.filter(channel, true), to, stride);
    };
    convolve(in.q, column(columns_.q, task.key_head, 1), task.key_head * keys, keys, chunk.q, chunk.padded);
    convolve(in.k, column(columns_.k, task.key_head, 1), key_dim + task.key_head * keys, keys, chunk.k, chunk.padded);
    for (int t = 0; t < count; t++) {
      use.normalise(chunk.q + size(t, chunk.padded), keys, kUnitEps, 1.0f / std::sqrt(static_cast<float>(keys)));
      use.normalise(chunk.k + size(t, chunk.padded), keys, kUnitEps, 1.0f);
    }
    for (int head = task.first; head < task.first + task.count; head++) {
      convolve(in.v, column(columns_.v, head, in_group), 2 * key_dim + head * values, values, chunk.v, values);
      factors(in, begin, head, chunk);
      use.delta({state + size(head * values, keys), values, keys, chunk.q, chunk.k, chunk.v, chunk.decay, chunk.beta,
                 chunk.decayed_k, count, chunk.out, chunk.spare});
      give(in, begin, head, chunk, y);
    }
  }
}

// Decays and strengths of a head.
void GatedDelta::factors(const DeltaInputs& in, int begin, int head, Chunk& chunk) const {
  const Recurrence& use = recurrence();
  const int in_group = shape_.value_heads / shape_.key_heads;
  const float rate = std::exp(a_log_.data()[head]), *bias = dt_bias_.data() + size(head, decays());
  const DecayRule rule{shape_.bound ? rate : -rate, shape_.bound.has_value(), shape_.bound.value_or(0.0f)};
  for (int t = 0; t < chunk.count; t++) {
    const float* a = in.a.at(begin + t, column(columns_.a, head, in_group));
    const float strength = sigmoid(*in.b.at(begin + t, column(columns_.b, head, in_group)));
    chunk.beta[t] = shape_.most_strength * strength;
    if (chunk.decayed_k == nullptr) {
      const float x = *a + *bias;
      chunk.decay[t] = std::exp(rule.bounded ? rule.bound * sigmoid(rule.rate * x) : rule.rate * softplus(x));
      continue;
    }
    const size_t at = size(t, chunk.padded);
    use.decays(rule, a, bias, shape_.key_size, chunk.decay + at);
    for (int i = 0; i < shape_.key_size; i++) chunk.decayed_k[at + i] = chunk.decay[at + i] * chunk.k[at + i];
  }
}

// What a head read, normed and gated.
void GatedDelta::give(const DeltaInputs& in, int begin, int head, const Chunk& chunk, float* y) const {
  const int values = shape_.value_size, in_group = shape_.value_heads / shape_.key_heads;
  for (int t = 0; t < chunk.count; t++) {
    float *row = chunk.out + size(t, values), *to = y + size(begin + t, width()) + size(head, values);
    floats().rms_norm(row, norm_.data(), shape_.eps, values, row);
    const float* gate = in.z.at(begin + t, column(columns_.z, head, in_group));
    floats().gate(shape_.gate, gate, row, values, to);
  }
}

Scan::Scan(ScanShape shape, const mx::array& filter, const std::optional<mx::array>& filter_bias, const mx::array& a_log,
           const mx::array& dt_bias, const mx::array& skip, const std::optional<mx::array>& norm)
    : shape_(shape), taps_(filter, filter_bias), a_log_(a_log, shape.heads), dt_bias_(dt_bias, shape.heads),
      skip_(skip, shape.heads) {
  require(shape.heads > 0 && shape.groups > 0 && shape.heads % shape.groups == 0 && shape.head_size > 0 &&
              shape.state_size > 0,
          "heads must come in equal groups");
  require(taps_.channels() == inner() + 2 * shape.groups * shape.state_size, "the filter does not fit the heads");
  require(norm.has_value() == (shape.norm_size > 0) && (shape.norm_size == 0 || inner() % shape.norm_size == 0),
          "the norm does not fit the heads");
  if (norm) norm_.emplace(*norm, inner());
}

void Scan::run(const float* x, int tokens, const std::vector<Piece>& pieces, float* tails, float* states, float* y) const {
  const size_t state_size = size(inner(), shape_.state_size);
  // b and c of all tokens, convolved once for all the heads that share them.
  std::vector<float> mixed(size(2 * shape_.groups, tokens) * recurrence().padded(shape_.state_size));
  mix(x, pieces, tails, tokens, mixed.data());
  Pool::shared().each(static_cast<int>(pieces.size()) * shape_.heads, [&](int index) {
    const Piece& piece = pieces[index / shape_.heads];
    run(x, piece, index % shape_.heads, tails, mixed.data(), tokens, states + piece.slot * state_size, y);
  });
  for (const Piece& piece : pieces)
    each_token(piece.count, [&](int i) {
      const int token = piece.first + i;
      gate(x + size(token, width()), y + size(token, inner()));
    });
  Pool::shared().each(static_cast<int>(pieces.size()), [&](int index) {
    const Piece& piece = pieces[index];
    renew(tails + piece.slot * taps_.tail_size(), taps_, piece, [&](int token, float* out) {
      std::memcpy(out, x + size(token, width()) + inner(), sizeof(float) * taps_.channels());
    });
  });
}

// [b, c] x groups x tokens x state_size.
void Scan::mix(const float* x, const std::vector<Piece>& pieces, const float* tails, int tokens, float* mixed) const {
  struct Part {
    const Piece* piece;
    int done;
  };
  std::vector<Part> parts;
  for (const Piece& piece : pieces)
    for (int done = 0; done < piece.count; done += kChunk) parts.push_back({&piece, done});
  const int keys = shape_.state_size, padded = recurrence().padded(keys), both = 2 * shape_.groups;
  Pool::shared().each(static_cast<int>(parts.size()) * both, [&](int index) {
    const auto& [piece, done] = parts[index / both];
    const int which = index % both, channel = inner() + which * keys, begin = piece->first + done;
    recurrence().convolve({x + size(begin, width()) + inner() + channel, static_cast<size_t>(width()), done,
                           piece->start == 0 ? nullptr : tails + piece->slot * taps_.tail_size() + channel,
                           static_cast<size_t>(taps_.channels()), std::min(kChunk, piece->count - done), keys},
                          taps_.filter(channel, true), mixed + (size(which, tokens) + begin) * padded, padded);
  });
}

void Scan::run(const float* x, const Piece& piece, int head, const float* tails, const float* mixed, int tokens,
               float* state, float* y) const {
  const Recurrence& use = recurrence();
  const bool fresh = piece.start == 0;
  const int keys = shape_.state_size, values = shape_.head_size, padded = use.padded(keys);
  const int group = head / (shape_.heads / shape_.groups), channel = head * values;
  float* own = scratch(size(kChunk, values) + size(kStateRows, padded) + 2 * kChunk);
  float *spare = own + size(kChunk, values), *decay = spare + size(kStateRows, padded), *dt = decay + kChunk;
  float* at = state + size(channel, keys);
  if (fresh) std::fill(at, at + size(values, keys), 0.0f);
  const float rate = -std::exp(a_log_.data()[head]), bias = dt_bias_.data()[head];
  for (int done = 0; done < piece.count; done += kChunk) {
    const int count = std::min(kChunk, piece.count - done), begin = piece.first + done;
    use.convolve({x + size(begin, width()) + inner() + channel, static_cast<size_t>(width()), done,
                  fresh ? nullptr : tails + piece.slot * taps_.tail_size() + channel,
                  static_cast<size_t>(taps_.channels()), count, values},
                 taps_.filter(channel, true), own, values);
    for (int t = 0; t < count; t++) {
      const float given = x[size(begin + t, width()) + inner() + taps_.channels() + head];
      dt[t] = std::clamp(softplus(given + bias), shape_.dt_least, shape_.dt_most);
      decay[t] = std::exp(rate * dt[t]);
    }
    const float* b = mixed + (size(group, tokens) + begin) * padded;
    const float* c = b + size(shape_.groups, tokens) * padded;
    use.scan({at, values, keys, b, c, own, decay, dt, skip_.data()[head], count, y + size(begin, inner()) + channel,
              static_cast<size_t>(inner()), spare});
  }
}

void Scan::gate(const float* x, float* y) const {
  const int all = inner();
  auto normed = [&](float* values) {
    for (int at = 0; shape_.norm_size > 0 && at < all; at += shape_.norm_size)
      floats().rms_norm(values + at, norm_->data() + at, shape_.eps, shape_.norm_size, values + at);
  };
  float* gated = scratch(all);
  std::memcpy(gated, x, sizeof(float) * all);
  if (shape_.norm_first) normed(y);
  floats().swiglu(gated, y, all);
  if (!shape_.norm_first) normed(gated);
  std::memcpy(y, gated, sizeof(float) * all);
}

}  // namespace ingot
