#include "linear.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "product.h"
#include "strided.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

// What both operations share: one input, one output, and weights that are not part of the graph.
class OfWeights : public mx::Primitive {
 public:
  OfWeights(mx::Stream stream, std::shared_ptr<const Weights> weights)
      : Primitive(stream), weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(inputs[0]);
    encoder.set_output_array(y);
    dispatch(encoder, inputs[0], y.data<float>());
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

  bool is_equivalent(const Primitive& other) const override {
    return weights_ == static_cast<const OfWeights&>(other).weights_;
  }

 protected:
  virtual void dispatch(mx::cpu::CommandEncoder& encoder, const mx::array& input, float* out) = 0;

  std::shared_ptr<const Weights> weights_;
};

class Linear : public OfWeights {
 public:
  using OfWeights::OfWeights;
  const char* name() const override { return "IngotLinear"; }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, const mx::array& x, float* out) override {
    const int count = static_cast<int>(x.size() / x.shape(-1));
    const float* from = x.data<float>();
    if (x.flags().row_contiguous)
      encoder.dispatch([weights = weights_, count, from, out] { multiply({{&weights->matrix(), out}}, from, count); });
    else
      encoder.dispatch([weights = weights_, count, from, out, shape = x.shape(), strides = x.strides()] {
        multiply({{&weights->matrix(), out}}, gathered(from, shape, strides).data(), count);
      });
  }
};

class Lookup : public OfWeights {
 public:
  using OfWeights::OfWeights;
  const char* name() const override { return "IngotLookup"; }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, const mx::array& ids, float* out) override {
    encoder.dispatch([weights = weights_, from = ids.data<int64_t>(), count = ids.size(), out] {
      const PackedMatrix& w = weights->matrix().packed;
      for (size_t i = 0; i < count; i++) {
        float* row = out + i * w.columns;
        if (from[i] >= 0 && from[i] < w.rows)
          kernels().unpack(w, static_cast<int>(from[i]), static_cast<int>(from[i]) + 1, row);
        else
          std::fill(row, row + w.columns, 0.0f);
      }
    });
  }
};

}  // namespace

mx::array linear(const mx::array& x, std::shared_ptr<const Weights> weights, mx::StreamOrDevice s) {
  const Matrix& w = weights->matrix();
  require(weights->matrices().size() == 1, "these are the weights of experts");
  require(x.ndim() >= 1 && x.shape(-1) == w.columns, "x and the weights disagree about the width");
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  mx::Shape shape = x.shape();
  shape.back() = w.rows;
  return mx::array(std::move(shape), mx::float32, std::make_shared<Linear>(stream, std::move(weights)),
                   {mx::astype(x, mx::float32, stream)});
}

mx::array lookup(const mx::array& ids, std::shared_ptr<const Weights> weights, mx::StreamOrDevice s) {
  const Matrix& w = weights->matrix();
  require(w.is_packed() && weights->matrices().size() == 1, "only packed weights are looked up here");
  const mx::Stream stream = mx::to_stream(s, mx::Device::cpu);
  mx::Shape shape = ids.shape();
  shape.push_back(w.columns);
  return mx::array(std::move(shape), mx::float32, std::make_shared<Lookup>(stream, std::move(weights)),
                   {mx::contiguous(mx::astype(ids, mx::int64, stream), false, stream)});
}

}  // namespace ingot
