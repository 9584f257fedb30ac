#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gguf_blocks.h"
#include "kernels.h"
#include "mlx/allocator.h"
#include "planes.h"
#include "pool.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr size_t kLine = 64;  // bytes

// An array of that shape whose values, yet to be written, begin where a cache line does, which mlx does not promise.
mx::array aligned(mx::Shape shape, mx::Dtype dtype) {
  mx::array made(std::move(shape), dtype, nullptr, {});
  const int extra = static_cast<int>(kLine / made.itemsize()), size = static_cast<int>(made.size());
  mx::array owner(mx::allocator::malloc(made.nbytes() + kLine), {size + extra}, dtype);
  const size_t off = (kLine - reinterpret_cast<uintptr_t>(owner.data<char>()) % kLine) % kLine;
  mx::Strides strides(made.ndim(), 1);
  for (int axis = static_cast<int>(made.ndim()) - 2; axis >= 0; axis--) strides[axis] = strides[axis + 1] * made.shape(axis + 1);
  made.copy_shared_buffer(owner, strides, {true, true, made.ndim() == 1}, made.size(), static_cast<int64_t>(off / made.itemsize()));
  made.set_status(mx::array::Status::available);
  return made;
}

// An array of zeros to be filled in.
template <class T>
struct Made {
  Made(mx::Shape shape, mx::Dtype dtype) : array(aligned(std::move(shape), dtype)), data(reinterpret_cast<T*>(array.data<char>())) {
    std::memset(data, 0, array.nbytes());
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

template <int Bits>
void put_row(const uint8_t* row, int columns, int place, int tile_rows, uint8_t* tile) {
  for (int k = 0; k < columns; k += kBlock, tile += plane_bytes(Bits, tile_rows))
    put_quanta<Bits>(tile, tile_rows, place, row + k);
}

// Where a row's quanta go in the tile that begins at `tile`. Those of 8 bits are changed to what is stored of them.
void write_row(uint8_t* row, int columns, int place, int tile_rows, int bits, uint8_t* tile) {
  if (bits == 8 && kernels().signed_bytes)
    for (int k = 0; k < columns; k++) row[k] ^= 128;
  switch (bits) {
    case 2: return put_row<2>(row, columns, place, tile_rows, tile);
    case 3: return put_row<3>(row, columns, place, tile_rows, tile);
    case 4: return put_row<4>(row, columns, place, tile_rows, tile);
    case 5: return put_row<5>(row, columns, place, tile_rows, tile);
    case 6: return put_row<6>(row, columns, place, tile_rows, tile);
    default: return put_row<8>(row, columns, place, tile_rows, tile);
  }
}

// Whether 16 bits hold all numbers exactly, as they do where a file kept them so.
bool fits_halves(const mx::array& numbers) {
  const mx::Device cpu = mx::Device::cpu;
  return mx::array_equal(mx::astype(mx::astype(numbers, mx::float16, cpu), mx::float32, cpu), numbers, cpu).item<bool>();
}

mx::array halved(const mx::array& numbers) {
  const mx::array halves = settled(numbers, mx::float16);
  mx::array made = aligned(numbers.shape(), mx::float16);
  std::memcpy(made.data<char>(), halves.data<char>(), halves.nbytes());
  return made;
}

// The extents of weights, and of the arrays that hold them arranged.
struct Extents {
  int experts, rows, columns, group, tile, stored;
  bool many;  // there is an axis for the experts

  int groups() const { return columns / group; }
  int tiles() const { return (rows + tile - 1) / tile; }
  size_t tile_bytes() const { return static_cast<size_t>(tile) * columns * stored / 8; }
  mx::Shape shape(int width) const {
    return many ? mx::Shape{experts, tiles() * tile, width} : mx::Shape{tiles() * tile, width};
  }
};

Extents extents(const mx::array& quanta, const mx::array& scales, int group, int bits, int stored) {
  const int axes = quanta.ndim();
  require((axes == 2 || axes == 3) && static_cast<int>(scales.ndim()) == axes, "weights must be matrices");
  require(quanta.dtype() == mx::uint32, "quanta must be uint32");
  require(quanta.shape(0) > 0, "there are no experts");
  const int rows = quanta.shape(-2), columns = scales.shape(-1) * group;
  require(scales.shape(-2) == rows && scales.shape(0) == quanta.shape(0) &&
              static_cast<int64_t>(quanta.shape(-1)) * 32 == static_cast<int64_t>(columns) * bits,
          "quanta and scales disagree");
  return {axes == 3 ? quanta.shape(0) : 1, rows, columns, group, kernels().tile, stored, axes == 3};
}

struct Affine {
  float scale, bias;
};

// read(n, row) gives the bytes of row n, factors(i) the scale and the bias of group i; both count through all experts.
template <class Read, class Factor>
Arranged filled(const Extents& e, const Read& read, const Factor& factors) {
  const size_t tiles = static_cast<size_t>(e.experts) * e.tiles(), groups = e.groups();
  Made<uint8_t> quanta(e.shape(e.columns * e.stored / 32), mx::uint32);
  Made<float> scales(e.shape(e.groups()), mx::float32), biases(e.shape(e.groups()), mx::float32);
  Pool::shared().each(static_cast<int>(tiles), [&](int index) {
    std::vector<uint8_t> row(e.columns);
    const int expert = index / e.tiles(), first = index % e.tiles() * e.tile;
    for (int place = 0; place < std::min(e.tile, e.rows - first); place++) {
      const size_t n = static_cast<size_t>(expert) * e.rows + first + place;
      read(n, row.data());
      write_row(row.data(), e.columns, place, e.tile, e.stored, quanta.data + index * e.tile_bytes());
      for (size_t g = 0; g < groups; g++) {
        const Affine own = factors(n * groups + g);
        const size_t to = (index * groups + g) * e.tile + place;
        scales.data[to] = own.scale;
        biases.data[to] = own.bias;
      }
    }
  });
  const bool fit = fits_halves(scales.array) && fits_halves(biases.array);
  auto kept = [&](const mx::array& factors) { return fit ? halved(factors) : factors; };
  return {quanta.array, kept(scales.array), kept(biases.array), e.experts, e.rows, e.columns, e.group, e.stored};
}

}  // namespace

Arranged arrange(const mx::array& quanta, const mx::array& scales, const mx::array& biases, int group, int bits) {
  require(bits >= 2 && bits <= 8 && bits != 7, "bits must be 2, 3, 4, 5, 6 or 8");
  require(group == 32 || group == 64 || group == 128, "the group size must be 32, 64 or 128");
  require(biases.shape() == scales.shape(), "weights must be matrices");
  const Extents e = extents(quanta, scales, group, bits, bits);
  const mx::array from = settled(quanta, mx::uint32), scale = settled(scales, mx::float32), bias = settled(biases, mx::float32);
  const size_t row_bytes = static_cast<size_t>(e.columns) * bits / 8;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from.data<uint32_t>());
  return filled(
      e,
      [&](size_t n, uint8_t* row) { read_row(bytes + n * row_bytes, bits, e.columns, row); },
      [&, s = scale.data<float>(), b = bias.data<float>()](size_t i) { return Affine{s[i], b[i]}; });
}

Arranged arrange_blocks(const mx::array& blocks, int bits) {
  require(bits >= 2 && bits <= 6, "bits must be 2, 3, 4, 5 or 6");
  require(blocks.dtype() == mx::uint8 && (blocks.ndim() == 2 || blocks.ndim() == 3), "blocks must be bytes of matrices");
  require(blocks.shape(0) > 0, "there are no experts");
  const size_t size = gguf_block_bytes(bits), row_bytes = blocks.shape(-1);
  require(row_bytes % size == 0, "rows do not divide into blocks of that width");
  const bool many = blocks.ndim() == 3;
  const int parts = static_cast<int>(row_bytes / size), columns = parts * kSuper;
  const Extents e{many ? blocks.shape(0) : 1, blocks.shape(-2), columns, kBlock, kernels().tile, bits, many};
  const size_t part_bytes = e.tile * super_form(bits).row_bytes();
  const mx::array from = settled(blocks, mx::uint8);
  Made<uint8_t> quanta(e.shape(columns * bits / 32), mx::uint32);
  Made<uint8_t> factors(e.shape(static_cast<int>(parts * super_form(bits).row_bytes())), mx::uint8);
  Pool::shared().each(e.experts * e.tiles(), [&](int index) {
    const int expert = index / e.tiles(), first = index % e.tiles() * e.tile;
    TakenApart apart;
    for (int row = 0; row < std::min(e.tile, e.rows - first); row++)
      for (int part = 0; part < parts; part++) {
        const size_t n = static_cast<size_t>(expert) * e.rows + first + row, place = static_cast<size_t>(index) * parts + part;
        take_apart(from.data<uint8_t>() + n * row_bytes + part * size, bits, apart);
        write_row(apart.quanta, kSuper, row, e.tile, bits, quanta.data + place * kSuper / kBlock * plane_bytes(bits, e.tile));
        const SuperRow to(bits, e.tile, row, factors.data + place * part_bytes);
        std::memcpy(to.unit(), apart.unit, sizeof(Half));
        if (super_form(bits).minima) std::memcpy(to.unit_of_minima(), apart.unit_of_minima, sizeof(Half));
        for (int i = 0; i < 16; i++) *to.factor(i) = apart.factors[i];
      }
  });
  return {quanta.array, factors.array, std::nullopt, e.experts, e.rows, e.columns, e.group, bits};
}

Arranged arrange_mxfp4(const mx::array& quanta, const mx::array& scales) {
  constexpr int kGroup = 32, kBits = 4;
  // Doubled, all values are whole numbers: they become bytes, with nought in the middle.
  constexpr int8_t kDoubled[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  require(scales.dtype() == mx::uint8, "scales must be uint8");
  const Extents e = extents(quanta, scales, kGroup, kBits, 8);
  const mx::array from = settled(quanta, mx::uint32), scale = settled(scales, mx::uint8);
  constexpr int kNought = 12;
  const size_t row_bytes = static_cast<size_t>(e.columns) * kBits / 8;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from.data<uint32_t>());
  return filled(
      e,
      [&](size_t n, uint8_t* row) {
        read_row(bytes + n * row_bytes, kBits, e.columns, row);
        for (int k = 0; k < e.columns; k++) row[k] = static_cast<uint8_t>(kDoubled[row[k]] + kNought);
      },
      [s = scale.data<uint8_t>()](size_t i) {
        const float half = std::ldexp(1.0f, s[i] - 128);
        return Affine{half, -half * static_cast<float>(kNought)};
      });
}

}  // namespace ingot
