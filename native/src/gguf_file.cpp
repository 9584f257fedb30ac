#include "gguf_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "gguf_blocks.h"
#include "half.h"
#include "mlx/allocator.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "pool.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

constexpr size_t kAtOnce = 1 << 20;  // bytes that a thread reads at a time

int64_t nanoseconds(const struct stat& status) {
#if defined(__APPLE__)
  return static_cast<int64_t>(status.st_mtimespec.tv_sec) * 1000000000 + status.st_mtimespec.tv_nsec;
#else
  return static_cast<int64_t>(status.st_mtim.tv_sec) * 1000000000 + status.st_mtim.tv_nsec;
#endif
}

}  // namespace

GgufFile::GgufFile(const std::string& path, int64_t size, int64_t changed_ns)
    : path_(path), size_(size), changed_ns_(changed_ns), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (fd_ < 0) throw std::runtime_error(path + " cannot be read: " + std::strerror(errno));
  try {
    check();
    uint8_t magic[4];
    if (!read(0, sizeof(magic), magic) || std::memcmp(magic, "GGUF", 4) != 0) throw std::runtime_error(path + " is no GGUF file");
  } catch (...) {
    close(fd_);
    throw;
  }
}

GgufFile::~GgufFile() { close(fd_); }

bool GgufFile::read(int64_t offset, size_t count, uint8_t* to) const {
  while (count > 0) {
    const ssize_t got = pread(fd_, to, count, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    offset += got;
    to += got;
    count -= static_cast<size_t>(got);
  }
  return true;
}

void GgufFile::check() const {
  struct stat status;
  if (fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) throw std::runtime_error(path_ + " is no regular file");
  if (status.st_size != size_ || nanoseconds(status) != changed_ns_)
    throw std::runtime_error(path_ + " was changed since it was looked at: start again with it");
}

namespace {

class Reading : public mx::Primitive {
 public:
  Reading(mx::Stream stream, FileRows from) : Primitive(stream), from_(std::move(from)) {}

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("ingot_native runs on CPUs only");
  }

  // At once, on the thread that asks, which is told what goes wrong: an operation that is posted could only end the process.
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
    const int head = std::max(1, from_.head), step = share();
    const int shares = (from_.rows + step - 1) / step, all = shares * static_cast<int>(from_.pieces.size());
    std::atomic<bool> short_of{false};
    Pool::shared().each(all, [&](int index) {
      const int piece = index / shares, first = index % shares * step, last = std::min(first + step, from_.rows);
      std::vector<uint8_t> bytes(static_cast<size_t>(last - first) * from_.row_bytes);
      const auto& [file, offset] = from_.pieces[piece];
      if (!file->read(offset + static_cast<int64_t>(first) * from_.row_bytes, bytes.size(), bytes.data())) {
        short_of = true;
        return;
      }
      for (int row = first; row < last; row++) {
        const int within = row % head, sorted = from_.head == 0 ? within : within / 2 + within % 2 * (head / 2);
        const size_t to = static_cast<size_t>(piece) * from_.rows + row - within + sorted;
        put(bytes.data() + static_cast<size_t>(row - first) * from_.row_bytes, to, outputs);
      }
    });
    for (const auto& [file, offset] : from_.pieces) file->check();
    if (short_of) throw std::runtime_error("a GGUF file ends before its tensors do, or cannot be read any more");
  }

 protected:
  // One row, to the row `to` of the outputs.
  virtual void put(const uint8_t* row, size_t to, std::vector<mx::array>& outputs) const = 0;

  const FileRows from_;

 private:
  // Rows that a thread reads at a time: whole heads, whose rows change places.
  int share() const {
    const int head = std::max(1, from_.head);
    return std::max(1, static_cast<int>(kAtOnce / std::max(1, from_.row_bytes)) / head) * head;
  }
};

class ReadingBytes : public Reading {
 public:
  using Reading::Reading;
  const char* name() const override { return "IngotFileBytes"; }

 protected:
  void put(const uint8_t* row, size_t to, std::vector<mx::array>& outputs) const override {
    std::memcpy(outputs[0].data<uint8_t>() + to * from_.row_bytes, row, from_.row_bytes);
  }
};

constexpr int kGroup = 32;

class ReadingPacked : public Reading {
 public:
  ReadingPacked(mx::Stream stream, FileRows from, int bits, bool minima)
      : Reading(stream, std::move(from)), bits_(bits), minima_(minima) {}
  const char* name() const override { return "IngotFilePacked"; }

 protected:
  void put(const uint8_t* row, size_t to, std::vector<mx::array>& outputs) const override {
    const size_t size = small_block_bytes(bits_, minima_), blocks = from_.row_bytes / size;
    uint8_t* quanta = reinterpret_cast<uint8_t*>(outputs[0].data<uint32_t>()) + to * blocks * kGroup * bits_ / 8;
    Half* scales = reinterpret_cast<Half*>(outputs[1].data<char>()) + to * blocks;
    Half* biases = reinterpret_cast<Half*>(outputs[2].data<char>()) + to * blocks;
    uint8_t codes[kGroup];
    for (size_t block = 0; block < blocks; block++, row += size, quanta += kGroup * bits_ / 8) {
      take_small(row, bits_, minima_, codes);
      std::memcpy(scales + block, row, sizeof(Half));
      if (minima_)
        std::memcpy(biases + block, row + 2, sizeof(Half));
      else
        biases[block] = half_of(value(scales[block]) * -static_cast<float>(1 << (bits_ - 1)));
      // Eight quanta fill as many bytes as they have bits.
      for (int first = 0; first < kGroup; first += 8) {
        uint64_t word = 0;
        for (int i = 0; i < 8; i++) word |= static_cast<uint64_t>(codes[first + i]) << (i * bits_);
        for (int byte = 0; byte < bits_; byte++) quanta[first / 8 * bits_ + byte] = static_cast<uint8_t>(word >> (8 * byte));
      }
    }
  }

 private:
  const int bits_;
  const bool minima_;
};

void check(const FileRows& from) {
  require(!from.pieces.empty() && from.rows > 0 && from.row_bytes > 0, "there is nothing to read");
  require(from.head == 0 || (from.head > 0 && from.head % 2 == 0 && from.rows % from.head == 0), "heads have whole pairs of rows");
}

}  // namespace

mx::array file_bytes(FileRows from) {
  check(from);
  const mx::Stream stream = mx::to_stream({}, mx::Device::cpu);
  const int rows = static_cast<int>(from.pieces.size()) * from.rows, width = from.row_bytes;
  return mx::array({rows, width}, mx::uint8, std::make_shared<ReadingBytes>(stream, std::move(from)), {});
}

std::vector<mx::array> file_packed(FileRows from, int bits, bool minima) {
  check(from);
  require((bits == 8 && !minima) || bits == 4 || bits == 5, "there is no such format");
  const int size = static_cast<int>(small_block_bytes(bits, minima));
  require(from.row_bytes % size == 0, "rows do not divide into blocks of that width");
  const mx::Stream stream = mx::to_stream({}, mx::Device::cpu);
  const int rows = static_cast<int>(from.pieces.size()) * from.rows, groups = from.row_bytes / size;
  return mx::array::make_arrays({{rows, groups * bits}, {rows, groups}, {rows, groups}}, {mx::uint32, mx::float16, mx::float16},
                                std::make_shared<ReadingPacked>(stream, std::move(from), bits, minima), {});
}

}  // namespace ingot
