#include "weights.h"

#include <stdexcept>
#include <string>

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
  return arranged(arrange(quanta, scales, biases, group, bits), bias);
}

Weights Weights::blocks(const mx::array& blocks, const std::optional<mx::array>& bias, int bits) {
  return arranged(arrange_blocks(blocks, bits), bias);
}

Weights Weights::mxfp4(const mx::array& quanta, const mx::array& scales, const std::optional<mx::array>& bias) {
  return arranged(arrange_mxfp4(quanta, scales), bias);
}

Weights Weights::arranged(const Arranged& from, const std::optional<mx::array>& bias) {
  Weights made;
  made.owned_ = {from.quanta, from.scales};
  if (from.biases) made.owned_.push_back(*from.biases);
  const mx::array& biases = from.biases.value_or(from.scales);
  const size_t quanta = from.quanta.nbytes() / from.experts, factors = from.scales.nbytes() / from.experts;
  const Factors form = !from.biases ? Factors::super : from.scales.dtype() == mx::float16 ? Factors::halves : Factors::floats;
  for (int expert = 0; expert < from.experts; expert++) {
    Matrix matrix;
    matrix.rows = from.rows;
    matrix.columns = from.columns;
    matrix.packed = {reinterpret_cast<const uint8_t*>(from.quanta.data<uint32_t>()) + expert * quanta,
                     from.scales.data<char>() + expert * factors,
                     biases.data<char>() + expert * factors,
                     from.rows,
                     from.columns,
                     from.group,
                     from.bits,
                     form};
    made.matrices_.push_back(matrix);
  }
  made.take_bias(bias);
  return made;
}

Weights Weights::plain(const mx::array& weight, const std::optional<mx::array>& bias) {
  require(weight.ndim() == 2 || weight.ndim() == 3, "a weight must be a matrix");
  const bool brain = weight.dtype() == mx::bfloat16, half = brain || weight.dtype() == mx::float16;
  Weights made;
  made.owned_ = {settled(weight, half ? weight.dtype() : mx::float32)};
  const int experts = weight.ndim() == 3 ? weight.shape(0) : 1;
  for (int expert = 0; expert < experts; expert++) {
    Matrix matrix;
    matrix.rows = weight.shape(-2);
    matrix.columns = weight.shape(-1);
    const size_t begin = static_cast<size_t>(expert) * matrix.rows * matrix.columns;
    if (half)
      matrix.half = {reinterpret_cast<const uint16_t*>(made.owned_[0].data<char>()) + begin, brain};
    else
      matrix.plain = made.owned_[0].data<float>() + begin;
    made.matrices_.push_back(matrix);
  }
  made.take_bias(bias);
  return made;
}

void Weights::take_bias(const std::optional<mx::array>& bias) {
  require(!matrices_.empty(), "there are no experts");
  require(matrix().columns > 0, "weights must have columns");
  if (!bias) return;
  const size_t rows = matrix().rows;
  require(bias->size() == rows * matrices_.size(), "the bias must have a value for each row");
  owned_.push_back(settled(*bias, mx::float32));
  for (size_t expert = 0; expert < matrices_.size(); expert++)
    matrices_[expert].bias = owned_.back().data<float>() + expert * rows;
}

Vector::Vector(const mx::array& values, int size) : owned_(settled(values, mx::float32)) {
  require(values.size() == static_cast<size_t>(size), "a norm's weight has the wrong size");
}

}  // namespace ingot
