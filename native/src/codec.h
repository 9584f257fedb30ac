// Codecs of kept keys and values as operations on arrays.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/mlx.h"

namespace ingot {

// How vectors are encoded; one serves any number of operations.
class Codec {
 public:
  static std::shared_ptr<Codec> turbo(std::vector<float> signs, std::vector<float> borders, std::vector<float> levels,
                                      bool keeps_length);
  static std::shared_ptr<Codec> affine(int size, int group, int bits);

  int size() const { return size_; }
  int code_bytes() const { return size_ * bits_ / 8; }  // of a vector
  int scales() const { return group_ == 0 ? 1 : 2 * (size_ / group_); }

  // Of `count` vectors that share two centres, which may be null.
  void encode(const mlx::core::array& from, size_t first, size_t count, std::array<const float*, 2> centres, uint8_t* codes,
              uint16_t* scales) const;
  void decode(const uint8_t* codes, const uint16_t* scales, mlx::core::array& to, size_t first, size_t count,
              std::array<const float*, 2> centres) const;

 private:
  Codec(int size, int bits, int group) : size_(size), bits_(bits), group_(group) {}

  int size_, bits_, group_;  // no group: it is rotated
  std::vector<float> signs_, borders_, levels_;
  bool keeps_length_ = false;
};

// Vectors [..., tokens, size] become codes [..., tokens, bytes] and scales [..., tokens, some]; each [tokens, size] has a
// centre of its own, [..., 1, size], where there are centres, and maybe another, for the vectors that are nearer to it.
std::vector<mlx::core::array> encode(std::shared_ptr<Codec> codec, const mlx::core::array& x,
                                     const std::optional<mlx::core::array>& centre, const std::optional<mlx::core::array>& other,
                                     mlx::core::StreamOrDevice stream = {});
mlx::core::array decode(std::shared_ptr<Codec> codec, const mlx::core::array& codes, const mlx::core::array& scales,
                        mlx::core::Dtype dtype, const std::optional<mlx::core::array>& centre,
                        const std::optional<mlx::core::array>& other, mlx::core::StreamOrDevice stream = {});

}  // namespace ingot
