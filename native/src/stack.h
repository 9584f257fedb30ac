// The layers of a transformer in one operation: norm, attention over live states, norm, gated MLP, layer after layer.
//
// At small batches what a CPU spends on dispatching an operation is more than what it spends on the operation, so
// there is one for all. Layers are those of Llama and its relatives: RMS norms before each half, rotary positions,
// grouped heads, optional biases, optional norms of queries and keys, SwiGLU.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attend.h"
#include "mlx/mlx.h"
#include "rotation.h"
#include "spans.h"
#include "weights.h"

namespace ingot {

struct StackShape {
  int heads, kv_heads, head_dim;
  float scale;  // of the scores
  float eps;    // of the norms
};

struct StackLayer {
  Vector attention_norm, mlp_norm;
  std::optional<Vector> q_norm, k_norm;
  Weights q, k, v, o, gate, up, down;
};

class Stack {
 public:
  Stack(StackShape shape, std::shared_ptr<const Rotation> rotation);
  void add(StackLayer layer);
  int size() const { return static_cast<int>(layers_.size()); }

  // x [tokens, hidden], in place; the states of each layer.
  void run(float* x, int tokens, const Spans& spans, const std::vector<States>& states) const;

  const StackShape& shape() const { return shape_; }
  int hidden() const { return layers_.front().q.matrix().columns; }

 private:
  struct Work;
  void run_plain(float* x, Work& work, const std::vector<States>& states) const;
  template <class Rows>
  void run_packed(Rows& normed, Rows& attended, Rows& inner, float* x, Work& work, const std::vector<States>& states) const;
  void attend(const StackLayer& layer, Work& work, const States& states) const;

  StackShape shape_;
  std::shared_ptr<const Rotation> rotation_;
  std::vector<StackLayer> layers_;
  bool packed_ = true;        // all matrices are
  std::optional<int> group_;  // of all of them, if they are packed and it is one size; else 0
};

// The operation: x [..., hidden] through the layers. Gives the result and the states, which are the ones given, in the
// same memory: who else holds them sees them change. Tokens that belong to no span are padding; what comes out for them
// means nothing.
// Raises std::invalid_argument for shapes that do not fit.
std::vector<mlx::core::array> run_stack(
    std::shared_ptr<const Stack> stack, const mlx::core::array& x, const std::vector<mlx::core::array>& keys,
    const std::vector<mlx::core::array>& values, std::shared_ptr<const Spans> spans, const std::vector<CodedStates>& coded = {},
    mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
