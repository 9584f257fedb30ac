#include "packing.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "mlx/allocator.h"
#include "pool.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

// An array of zeros to be filled in.
template <class T>
struct Made {
  Made(mx::Shape shape, mx::Dtype dtype, size_t count)
      : array(mx::allocator::malloc(count * sizeof(T)), std::move(shape), dtype),
        data(reinterpret_cast<T*>(array.data<char>())) {
    std::memset(data, 0, count * sizeof(T));
  }

  mx::array array;
  T* data;
};

// The quanta of a row, which mlx writes as one stream of bits, the lowest first.
void read_row(const uint8_t* p, int bits, int columns, uint8_t* out) {
  uint32_t held = 0;
  int count = 0;
  for (int k = 0; k < columns; k++) {
    if (count < bits) {
      held |= static_cast<uint32_t>(*p++) << count;
      count += 8;
    }
    out[k] = static_cast<uint8_t>(held & ((1u << bits) - 1));
    held >>= bits;
    count -= bits;
  }
}

// Where a row's quanta go in the tile that begins at `tile`.
void write_row(const uint8_t* row, int columns, int place, int tile_rows, int bits, bool signed_bytes, uint8_t* tile) {
  for (int k = 0; k < columns; k++) {
    const size_t block = k / kBlock, step = k % kBlock / 4, t = k % 4;
    if (bits == 8) {
      tile[(block * 8 + step) * tile_rows * 4 + place * 4 + t] = signed_bytes ? row[k] ^ 128 : row[k];
    } else {
      uint8_t& both = tile[(block * 4 + step / 2) * tile_rows * 4 + place * 4 + t];
      both = static_cast<uint8_t>(both | row[k] << (step % 2 * 4));
    }
  }
}

// Whether 16 bits hold all numbers exactly, as they do where a file kept them so.
bool fits_halves(const mx::array& numbers) {
  const mx::Device cpu = mx::Device::cpu;
  return mx::array_equal(mx::astype(mx::astype(numbers, mx::float16, cpu), mx::float32, cpu), numbers, cpu).item<bool>();
}

}  // namespace

Arranged arrange(const mx::array& quanta, const mx::array& scales, const mx::array& biases, int group, int bits) {
  require(bits >= 2 && bits <= 8 && bits != 7, "bits must be 2, 3, 4, 5, 6 or 8");
  require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
  require(quanta.ndim() == 2 && scales.ndim() == 2 && biases.shape() == scales.shape(), "weights must be matrices");
  require(quanta.dtype() == mx::uint32, "quanta must be uint32");
  const int rows = quanta.shape(0), columns = scales.shape(1) * group, groups = scales.shape(1);
  require(scales.shape(0) == rows && static_cast<int64_t>(quanta.shape(1)) * 32 == static_cast<int64_t>(columns) * bits,
          "quanta and scales disagree");
  const Kernels& use = kernels();
  const int stored = bits <= 4 ? 4 : 8, tile = use.tile, tiles = (rows + tile - 1) / tile;
  const mx::array from = settled(quanta, mx::uint32), scale = settled(scales, mx::float32), bias = settled(biases, mx::float32);
  const size_t tile_bytes = static_cast<size_t>(tile) * columns * stored / 8;
  Made<uint8_t> out({tiles * tile, columns * stored / 32}, mx::uint32, tile_bytes * tiles);
  Made<float> out_scales({tiles * tile, groups}, mx::float32, static_cast<size_t>(tiles) * tile * groups);
  Made<float> out_biases({tiles * tile, groups}, mx::float32, static_cast<size_t>(tiles) * tile * groups);
  const bool shifted = stored == 8 && use.signed_bytes;
  const size_t row_bytes = static_cast<size_t>(columns) * bits / 8;
  Pool::shared().each(tiles, [&](int index) {
    std::vector<uint8_t> row(columns);
    for (int n = index * tile; n < std::min(rows, (index + 1) * tile); n++) {
      read_row(reinterpret_cast<const uint8_t*>(from.data<uint32_t>()) + n * row_bytes, bits, columns, row.data());
      write_row(row.data(), columns, n % tile, tile, stored, shifted, out.data + index * tile_bytes);
      for (int g = 0; g < groups; g++) {
        const size_t at = static_cast<size_t>(n) * groups + g, to = (static_cast<size_t>(index) * groups + g) * tile + n % tile;
        out_scales.data[to] = scale.data<float>()[at];
        out_biases.data[to] = bias.data<float>()[at];
      }
    }
  });
  const bool fit = fits_halves(out_scales.array) && fits_halves(out_biases.array);
  auto kept = [&](const mx::array& factors) { return fit ? settled(factors, mx::float16) : factors; };
  return {out.array, kept(out_scales.array), kept(out_biases.array), stored};
}

}  // namespace ingot
