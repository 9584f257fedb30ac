#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "floats.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "product.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

// Memory that is written before it is read.
std::unique_ptr<float[]> room(size_t count, int width) {
  return std::make_unique_for_overwrite<float[]>(count * width);
}

// The tokens' choices: pair i is token i / k and its expert.
struct Choices {
  const int32_t* experts;
  size_t pairs;
  int k;
};

// The pairs of one expert.
struct Share {
  int expert;
  std::vector<size_t> pairs;
};

// The most pairs first, so that the threads end together.
std::vector<Share> shared_out(const Choices& choices, int experts) {
  std::vector<Share> shares(experts);
  for (int expert = 0; expert < experts; expert++) shares[expert].expert = expert;
  for (size_t pair = 0; pair < choices.pairs; pair++)
    if (const int expert = choices.experts[pair]; expert >= 0 && expert < experts) shares[expert].pairs.push_back(pair);
  std::erase_if(shares, [](const Share& share) { return share.pairs.empty(); });
  std::stable_sort(shares.begin(), shares.end(),
                   [](const Share& a, const Share& b) { return a.pairs.size() > b.pairs.size(); });
  return shares;
}

// A layer of experts that gives `width()` values for a pair; `run` computes some pairs of one expert.
template <class Layer>
void run_all(const Layer& layer, const Choices& choices, const float* x, float* y) {
  const int columns = layer.columns(), width = layer.width();
  const std::vector<Share> shares = shared_out(choices, layer.experts());
  size_t chosen = 0;
  for (const Share& share : shares) chosen += share.pairs.size();
  if (chosen < choices.pairs) std::fill(y, y + choices.pairs * width, 0.0f);
  auto run = [&](const Share& share) {
    const size_t count = share.pairs.size();
    if (count == 1) {
      const size_t pair = share.pairs[0];
      layer.run(share.expert, x + pair / choices.k * columns, 1, y + pair * width);
      return;
    }
    const auto in = room(count, columns), out = room(count, width);
    for (size_t i = 0; i < count; i++)
      std::memcpy(&in[i * columns], x + share.pairs[i] / choices.k * columns, sizeof(float) * columns);
    layer.run(share.expert, in.get(), static_cast<int>(count), out.get());
    for (size_t i = 0; i < count; i++) std::memcpy(y + share.pairs[i] * width, &out[i * width], sizeof(float) * width);
  };
  // An expert with a large part of the work takes all threads; of the others, which come after, each takes one.
  const size_t much = chosen / (2 * Pool::shared().threads());
  const auto small = std::find_if(shares.begin(), shares.end(), [&](const Share& share) { return share.pairs.size() <= much; });
  for (auto share = shares.begin(); share != small; share++) run(*share);
  Pool::shared().each(static_cast<int>(shares.end() - small), [&](int index) { run(small[index]); });
}

struct Linear {
  std::shared_ptr<const Weights> weights;

  int experts() const { return static_cast<int>(weights->matrices().size()); }
  int columns() const { return weights->matrix().columns; }
  int width() const { return weights->matrix().rows; }
  void run(int expert, const float* x, int count, float* y) const {
    multiply_one_path({{&weights->matrices()[expert], y}}, x, count);
  }
};

struct Gated : GatedExperts {
  explicit Gated(GatedExperts experts) : GatedExperts(std::move(experts)) {}

  int experts() const { return static_cast<int>(gate->matrices().size()); }
  int columns() const { return gate->matrix().columns; }
  int width() const { return down->matrix().rows; }
  void run(int expert, const float* x, int count, float* y) const {
    const int inner = gate->matrix().rows;
    const auto gates = room(count, inner), ups = room(count, inner);
    multiply_one_path({{&gate->matrices()[expert], gates.get()}, {&up->matrices()[expert], ups.get()}}, x, count);
    each_token(count, [&](int row) {
      activate(&gates[static_cast<size_t>(row) * inner], &ups[static_cast<size_t>(row) * inner], inner);
    });
    multiply_one_path({{&down->matrices()[expert], y}}, gates.get(), count);
  }

 private:
  // By g * sigmoid(a * g) * u = (a * g) * sigmoid(a * g) * (u / a).
  void activate(float* g, float* u, int size) const {
    const auto [slope, limit, offset] = gating;
    if (std::isfinite(limit))
      for (int i = 0; i < size; i++) {
        g[i] = std::min(g[i], limit);
        u[i] = std::clamp(u[i], -limit, limit);
      }
    if (slope != 1.0f || offset != 0.0f)
      for (int i = 0; i < size; i++) {
        g[i] *= slope;
        u[i] = (u[i] + offset) / slope;
      }
    floats().swiglu(g, u, size);
  }
};

template <class Layer>
class OfExperts : public mx::Primitive {
 public:
  OfExperts(mx::Stream stream, Layer layer) : Primitive(stream), layer_(std::move(layer)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(y);
    const Choices choices{inputs[1].data<int32_t>(), inputs[1].size(), inputs[1].shape(-1)};
    encoder.dispatch([layer = layer_, choices, x = inputs[0].data<float>(), out = y.data<float>()] {
      run_all(layer, choices, x, out);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

  const char* name() const override { return "IngotExperts"; }

 private:
  Layer layer_;
};

template <class Layer>
mx::array operation(const mx::array& x, const mx::array& indices, Layer layer, mx::StreamOrDevice s) {
  require(x.ndim() >= 1 && x.shape(-1) == layer.columns(), "x and the weights disagree about the width");
  mx::Shape tokens = x.shape(), shape = indices.shape();
  require(indices.ndim() == x.ndim(), "there must be indices for each token");
  tokens.back() = indices.shape(-1);
  require(tokens == shape, "there must be indices for each token");
  shape.push_back(layer.width());
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  auto plain = [&](const mx::array& a, mx::Dtype dtype) {
    return mx::contiguous(mx::astype(a, dtype, stream), false, stream);
  };
  return mx::array(std::move(shape), mx::float32, std::make_shared<OfExperts<Layer>>(stream, std::move(layer)),
                   {plain(x, mx::float32), plain(indices, mx::int32)});
}

}  // namespace

mx::array gather(const mx::array& x, const mx::array& indices, std::shared_ptr<const Weights> weights, mx::StreamOrDevice s) {
  return operation(x, indices, Linear{std::move(weights)}, s);
}

mx::array gather_gated(const mx::array& x, const mx::array& indices, GatedExperts experts, mx::StreamOrDevice s) {
  const Matrix &gate = experts.gate->matrix(), &up = experts.up->matrix(), &down = experts.down->matrix();
  const size_t count = experts.gate->matrices().size();
  require(experts.up->matrices().size() == count && experts.down->matrices().size() == count,
          "the weights are of different numbers of experts");
  require(gate.columns == up.columns && gate.rows == up.rows && down.columns == gate.rows,
          "the experts' weights do not fit together");
  require(experts.gating.slope > 0 && experts.gating.limit > 0, "slope and limit must be above nought");
  return operation(x, indices, Gated(std::move(experts)), s);
}

}  // namespace ingot
