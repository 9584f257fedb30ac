// A fork-join pool for short loops. The caller works too; helpers look for work briefly after each loop, then sleep,
// so that an idle process burns nothing and decoding, which is hundreds of short loops a second, does not pay for
// waking them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace ingot {

class Pool {
 public:
  static Pool& shared();

  // Calls body(i) for every i in [0, count), on several threads, of which each takes `step` at a time. Of the parts of that
  // size, thread t takes those numbered t, t + threads and so on, one after another, and then what others have not begun.
  // Loops of two threads at once are run one after the other: the second caller does its own alone.
  template <class Body>
  void each(int count, const Body& body, int step = 1) {
    run(count, step, [](const void* context, int index) { (*static_cast<const Body*>(context))(index); }, &body);
  }

  int threads() const { return static_cast<int>(lanes_.size()); }

 private:
  using Call = void (*)(const void*, int);

  // What a thread has to do. It lies alone in the lines of a cache that its thread and, at the end of a loop, others ask for:
  // a counter that all threads share would be what they wait for.
  struct alignas(128) Lane {
    std::atomic<uint64_t> taken{0};    // the loop's number, and how many of the lane's parts have been taken in it
    std::atomic<bool> inside{false};   // a helper may touch the open loop
  };

  explicit Pool(int threads);
  void run(int count, int step, Call call, const void* context);
  void help(int own);
  void work(int own);
  int take(int lane);
  void do_all_of(int lane);
  void look_at_lanes() const;

  std::vector<Lane> lanes_;  // the caller's is the first
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  alignas(128) std::atomic<uint32_t> open_{0};  // odd while a loop is open
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int count_ = 0, step_ = 1, parts_ = 0;
  uint64_t loop_ = 0;  // its number
  alignas(128) std::atomic<int> asleep_{0};
};

// Calls body(token) for each token of a launch, which is little work: few are not worth sharing out, and of many a thread
// takes several at a time.
template <class Body>
void each_token(int tokens, const Body& body) {
  constexpr int kSerial = 4, kTurns = 32;
  Pool& pool = Pool::shared();
  if (tokens < kSerial)
    for (int token = 0; token < tokens; token++) body(token);
  else
    pool.each(tokens, body, std::max(1, tokens / (pool.threads() * kTurns)));
}

}  // namespace ingot
