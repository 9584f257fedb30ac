// Tensors of a GGUF file that stay in it: they are read when they are first needed, straight into what the model holds.
//
// The file is read and not mapped. The kernels want weights in an order of their own anyway, and a mapped file that somebody cuts
// short ends the process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlx/mlx.h"

namespace ingot {

class GgufFile {
 public:
  // Raises std::runtime_error unless it is a GGUF file of that size, last changed then.
  GgufFile(const std::string& path, int64_t size, int64_t changed_ns);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  // Whether all of the bytes are there.
  bool read(int64_t offset, size_t count, uint8_t* to) const;
  // Raises std::runtime_error where it is not the same any more.
  void check() const;

 private:
  std::string path_;
  int64_t size_, changed_ns_;
  int fd_;
};

// Where a tensor lies: in one piece, or in one for each expert, of as many rows each.
struct FileRows {
  std::vector<std::pair<std::shared_ptr<const GgufFile>, int64_t>> pieces;  // and offsets
  int rows;       // of a piece
  int row_bytes;  // in the file
  int head;       // not 0: of so many rows each, those that are even come first
};

// uint8 [pieces * rows, row_bytes], as they lie in the file.
mlx::core::array file_bytes(FileRows from);

// Rows of blocks of 32 weights, which are what MLX packs in groups of 32: quanta, scales and biases, [pieces * rows, ...].
// `bits` and `minima` tell the formats apart: Q4_0, Q5_0 and Q8_0 have none, Q4_1 and Q5_1 have one for each block.
std::vector<mlx::core::array> file_packed(FileRows from, int bits, bool minima);

}  // namespace ingot
