#include "reserve.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "mlx/allocator.h"
#include "weights.h"

namespace ingot {
namespace mx = mlx::core;
namespace {

size_t memory_page() {
  static const size_t size = sysconf(_SC_PAGESIZE);
  return size;
}

// mlx finds the size of a buffer in front of its bytes.
size_t header() {
  static const size_t bytes = [] {
    const mx::allocator::Data probe = mx::allocator::malloc(1);
    mx::allocator::Buffer buffer = probe.buffer();
    return static_cast<size_t>(static_cast<char*>(buffer.raw_ptr()) - static_cast<char*>(buffer.ptr()));
  }();
  if (bytes != sizeof(size_t)) throw std::runtime_error("ingot_native.reserve does not know the buffers of this mlx");
  return bytes;
}

size_t bytes_of(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = dtype.size();
  constexpr size_t kMost = std::numeric_limits<int64_t>::max();
  for (const int length : shape) {
    require(length >= 0, "an axis is not negative");
    require(length == 0 || bytes <= kMost / length, "no array is that large");
    bytes *= length;
  }
  return bytes;
}

}  // namespace

mx::array reserve(const mx::Shape& shape, mx::Dtype dtype) {
  const size_t page = memory_page(), before = header(), bytes = bytes_of(shape, dtype);
  // A memory page in front holds the header, so that the numbers begin where one begins.
  const size_t length = page + (bytes + page - 1) / page * page;
  void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  // Huge ones would exist around whatever was written. Where the system has none, there is nothing to refuse.
  madvise(mapped, length, MADV_NOHUGEPAGE);
  char* buffer = static_cast<char*>(mapped) + page - before;
  std::memcpy(buffer, &bytes, sizeof(bytes));
  mx::allocator::Data data(mx::allocator::Buffer(buffer), [mapped, length](mx::allocator::Buffer) { munmap(mapped, length); });
  return mx::array(std::move(data), shape, dtype);
}

void discard(mx::array& array, const std::vector<int>& rows) {
  require(array.ndim() > 0, "an array without axes has no rows");
  for (const int row : rows) require(row >= 0 && row < array.shape(0), "there is no such row");
  if (rows.empty() || array.size() == 0) return;
  array.eval();
  array.wait();
  require(array.flags().row_contiguous, "rows must lie behind one another");
  const uintptr_t page = memory_page(), row_bytes = array.nbytes() / array.shape(0);
  for (const int row : rows) {
    char *begin = array.data<char>() + row * row_bytes, *end = begin + row_bytes;
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin), last = reinterpret_cast<uintptr_t>(end);
    const uintptr_t whole = (first + page - 1) / page * page, past = last / page * page;
    if (whole >= past || madvise(reinterpret_cast<void*>(whole), past - whole, MADV_DONTNEED) != 0) {
      std::memset(begin, 0, row_bytes);
      continue;
    }
    std::memset(begin, 0, whole - first);
    std::memset(reinterpret_cast<void*>(past), 0, last - past);
  }
}

}  // namespace ingot
