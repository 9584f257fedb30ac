// Recurrent layers between their matrix products, each as one operation over live states: causal convolution, the
// gated delta rule, Mamba 2's scan, with the gates and norms around them.
//
// A layer's live state are two arrays with a row for each slot: the last tokens that its convolution saw, and what its
// rule carries on. Operations write both in place: who else holds them sees them change.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "floats.h"
#include "mlx/mlx.h"
#include "recurrence.h"
#include "spans.h"
#include "weights.h"

namespace ingot {

// Tokens [first, first + count) of the launch are those of one sequence: the row `slot` of the states, from the
// position `start` on.
struct Piece {
  int first, count, slot, start;
};

// A filter for each channel: weight [channels, taps] or [channels, taps, 1], oldest tap first.
class Taps {
 public:
  Taps(const mlx::core::array& weight, const std::optional<mlx::core::array>& bias);
  Filter filter(int channel, bool silu) const;
  int taps() const { return taps_; }
  int kept() const { return taps_ - 1; }  // tokens that the next ones need
  int channels() const { return channels_; }
  size_t tail_size() const { return static_cast<size_t>(kept()) * channels_; }

 private:
  int channels_, taps_;
  Vector weight_;  // [taps, channels]
  std::optional<Vector> bias_;
};

// A causal convolution by itself. With gates, x is [b, c, x] side by side and y = c * convolved(b * x), as LFM2 has it.
class Convolution {
 public:
  Convolution(const mlx::core::array& weight, const std::optional<mlx::core::array>& bias, bool silu, bool gated);
  int channels() const { return taps_.channels(); }
  int width() const { return gated_ ? 3 * channels() : channels(); }
  const Taps& taps() const { return taps_; }
  // x [tokens, width], tails [slots, taps - 1, channels], y [tokens, channels].
  void run(const float* x, const std::vector<Piece>& pieces, float* tails, float* y) const;

 private:
  void run(const float* x, const Piece& piece, int first, int size, float* tail, float* y) const;

  Taps taps_;
  bool silu_, gated_;
};

// Where heads stand in a token's row: those that share a key are a group.
struct Columns {
  int first, head, group;  // the first head's column; from head to head in a group; from group to group
};

struct DeltaShape {
  int key_heads, value_heads, key_size, value_size;
  float eps;                     // of the norm of what comes out
  bool decays_by_key;            // each number of a key has a decay of its own, not each head one
  std::optional<float> bound;    // of the decays' logarithms, as DecayRule has it
  float most_strength;           // beta at most
  Gate gate;
};

struct DeltaColumns {
  Columns q, k, v, z, b, a;
};

// Rows of tokens, so many floats wide.
struct TokenRows {
  const float* x;
  size_t width;
  const float* at(int token, int column) const { return x + token * width + column; }
};

// What one gated delta layer is given; some of it may be the same rows.
struct DeltaInputs {
  TokenRows q, k, v, z, b, a;
};

// Gated delta layers, as those of Qwen 3 Next and of Kimi Linear: convolved queries, keys and values, the first two of length
// one; decays from `a`, beta from `b`; the output is normed and gated by `z`.
class GatedDelta {
 public:
  GatedDelta(DeltaShape shape, DeltaColumns columns, const mlx::core::array& filter, const mlx::core::array& a_log,
             const mlx::core::array& dt_bias, const mlx::core::array& norm);
  const DeltaShape& shape() const { return shape_; }
  const Taps& taps() const { return taps_; }
  int width() const { return shape_.value_heads * shape_.value_size; }
  bool fits(const DeltaInputs& inputs) const;
  // tails [slots, taps - 1, channels], states [slots, value_heads, value_size, key_size], y [tokens, width].
  void run(const DeltaInputs& inputs, const std::vector<Piece>& pieces, float* tails, float* states, float* y) const;

 private:
  struct Task;
  struct Chunk;
  void run(const DeltaInputs& inputs, const Task& task, const float* tail, float* state, float* y) const;
  void factors(const DeltaInputs& inputs, int begin, int head, Chunk& chunk) const;
  void give(const DeltaInputs& inputs, int begin, int head, const Chunk& chunk, float* y) const;

  int decays() const { return shape_.decays_by_key ? shape_.key_size : 1; }  // of a value head

  DeltaShape shape_;
  DeltaColumns columns_;
  Taps taps_;
  Vector a_log_, dt_bias_, norm_;
};

struct ScanShape {
  int heads, groups, head_size, state_size;
  float dt_least, dt_most;
  float eps;
  int norm_size;    // neighbours that are normed together; 0 where nothing is
  bool norm_first;  // before the gate; else after it
};

// The mixer of Mamba 2 and its relatives: x [gate, x, b, c, dt] side by side; x, b and c are convolved.
class Scan {
 public:
  Scan(ScanShape shape, const mlx::core::array& filter, const std::optional<mlx::core::array>& filter_bias,
       const mlx::core::array& a_log, const mlx::core::array& dt_bias, const mlx::core::array& skip,
       const std::optional<mlx::core::array>& norm);
  const ScanShape& shape() const { return shape_; }
  const Taps& taps() const { return taps_; }
  int inner() const { return shape_.heads * shape_.head_size; }
  int width() const { return inner() + taps_.channels() + shape_.heads; }
  // tails [slots, taps - 1, channels], states [slots, heads, head_size, state_size], y [tokens, inner].
  void run(const float* x, int tokens, const std::vector<Piece>& pieces, float* tails, float* states, float* y) const;

 private:
  void mix(const float* x, const std::vector<Piece>& pieces, const float* tails, int tokens, float* mixed) const;
  void run(const float* x, const Piece& piece, int head, const float* tails, const float* mixed, int tokens, float* state,
           float* y) const;
  void gate(const float* x, float* y) const;

  ScanShape shape_;
  Taps taps_;
  Vector a_log_, dt_bias_, skip_;
  std::optional<Vector> norm_;
};

// A layer's projections: what makes each of its inputs, one matrix (which may make several) or some behind one another,
// and what takes its output.
struct Projections {
  std::vector<std::vector<std::shared_ptr<const Weights>>> in;
  std::shared_ptr<const Weights> out;
};

// What an operation is asked for.
struct Wanted {
  std::vector<Piece> pieces;
  // Also give copies [earlier, pieces, ...] of the states: the first as they were without the last token of each piece,
  // the next without its last two, and so on; zeros where a piece is not that long. Who has a model verify tokens that
  // were guessed goes on from one of these.
  int earlier = 0;
  // With projections the operation takes what goes into them, and gives what comes out of them.
  std::optional<Projections> through;
};

// The operations. Each gives y [..., width] and the states, which are the ones given, in the same memory. A piece that
// starts at 0 finds no state, whatever the arrays hold. Tokens that belong to no piece are padding; they come out as zeros
// in front of the last projection. Raise std::invalid_argument for shapes that do not fit.
std::vector<mlx::core::array> convolve(std::shared_ptr<const Convolution> layer, const std::vector<mlx::core::array>& given,
                                       const mlx::core::array& tails, Wanted wanted, mlx::core::StreamOrDevice stream = {});
// Given q, k, v, z, b and a.
std::vector<mlx::core::array> gated_delta(std::shared_ptr<const GatedDelta> layer,
                                          const std::vector<mlx::core::array>& given, const mlx::core::array& tails,
                                          const mlx::core::array& states, Wanted wanted,
                                          mlx::core::StreamOrDevice stream = {});
std::vector<mlx::core::array> scan(std::shared_ptr<const Scan> layer, const std::vector<mlx::core::array>& given,
                                   const mlx::core::array& tails, const mlx::core::array& states, Wanted wanted,
                                   mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
