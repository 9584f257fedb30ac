// What operations borrow from Python.
//
// A pointer that comes from Python can only be let go of with Python's lock. A thread that computes would wait for that
// lock for as long as another thread of Python's holds it, and everybody who waits for the operation with it. So what an
// operation is done with is put aside, and let go of by the next call that comes from Python, which has the lock.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ingot {

class Returned {
 public:
  static void put(std::shared_ptr<const void> used) {
    Returned& all = shared();
    const std::lock_guard lock(all.mutex_);
    all.used_.push_back(std::move(used));
  }

  // Only with Python's lock.
  static void let_go() {
    Returned& all = shared();
    std::vector<std::shared_ptr<const void>> used;
    {
      const std::lock_guard lock(all.mutex_);
      used.swap(all.used_);
    }
  }

 private:
  static Returned& shared() {
    static Returned* all = new Returned;  // never destroyed: Python may be gone by then
    return *all;
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<const void>> used_;
};

// The same object for an operation, which may let go of it on any thread. Only with Python's lock.
template <class T>
std::shared_ptr<T> lent(std::shared_ptr<T> own) {
  Returned::let_go();
  T* object = own.get();
  return std::shared_ptr<T>(object, [own = std::move(own)](T*) mutable { Returned::put(std::move(own)); });
}

}  // namespace ingot
