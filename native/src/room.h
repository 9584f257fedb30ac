// Memory for numbers that are written before they are read. It begins where a cache line does, so that no vector of
// 64 bytes lies in two.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace ingot {

template <class T>
class Room {
 public:
  Room() = default;
  explicit Room(size_t count) { at_least(count); }
  Room(Room&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  Room& operator=(Room&&) = delete;
  ~Room() { std::free(data_); }

  // Room for so many numbers; what was there is lost when it grows.
  T* at_least(size_t count) {
    if (count <= count_) return data_;
    std::free(data_);
    count_ = 0;
    data_ = static_cast<T*>(std::aligned_alloc(kLine, (count * sizeof(T) + kLine - 1) / kLine * kLine));
    if (data_ == nullptr) throw std::bad_alloc();
    count_ = count;
    return data_;
  }

  T* data() const { return data_; }

 private:
  static constexpr size_t kLine = 64;

  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace ingot
