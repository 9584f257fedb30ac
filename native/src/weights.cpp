#include "weights.h"

#include <stdexcept>
#include <string>

#include "packing.h"

namespace ingot {
namespace mx = mlx::core;

mx::array settled(const mx::array& a, mx::Dtype dtype) {
  mx::array made = mx::contiguous(mx::astype(a, dtype, mx::Device::cpu), false, mx::Device::cpu);
  mx::eval(made);
  return made;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("ingot_native: ") + what);
}

Weights Weights::packed(const mx::array& quanta, const mx::array& scales, const mx::array& biases,
                        const std::optional<mx::array>& bias, int group, int bits) {
  const Arranged arranged = arrange(quanta, scales, biases, group, bits);
  Weights made;
  made.owned_ = {arranged.quanta, arranged.scales, arranged.biases};
  made.matrix_.rows = quanta.shape(0);
  made.matrix_.columns = scales.shape(1) * group;
  made.matrix_.packed = {reinterpret_cast<const uint8_t*>(arranged.quanta.data<uint32_t>()),
                         arranged.scales.data<void>(),
                         arranged.biases.data<void>(),
                         made.matrix_.rows,
                         made.matrix_.columns,
                         group,
                         arranged.bits,
                         arranged.scales.dtype() == mx::float16};
  made.take_bias(bias);
  return made;
}

Weights Weights::plain(const mx::array& weight, const std::optional<mx::array>& bias) {
  require(weight.ndim() == 2, "a weight must be a matrix");
  Weights made;
  made.owned_ = {settled(weight, mx::float32)};
  made.matrix_.rows = weight.shape(0);
  made.matrix_.columns = weight.shape(1);
  made.matrix_.plain = made.owned_[0].data<float>();
  made.take_bias(bias);
  return made;
}

void Weights::take_bias(const std::optional<mx::array>& bias) {
  if (!bias) return;
  require(bias->size() == static_cast<size_t>(matrix_.rows), "the bias must have a value for each row");
  owned_.push_back(settled(*bias, mx::float32));
  matrix_.bias = owned_.back().data<float>();
}

Vector::Vector(const mx::array& values, int size) : owned_(settled(values, mx::float32)) {
  require(values.size() == static_cast<size_t>(size), "a norm's weight has the wrong size");
}

}  // namespace ingot
