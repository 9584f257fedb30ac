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

  // Calls body(i) for every i in [0, count), on several threads, of which each takes `step` at a time. Loops of two threads
  // at once are run one after the other: the second caller does its own alone.
  template <class Body>
  void each(int count, const Body& body, int step = 1) {
    run(count, step, [](const void* context, int index) { (*static_cast<const Body*>(context))(index); }, &body);
  }

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

 private:
  using Call = void (*)(const void*, int);

  explicit Pool(int threads);
  void run(int count, int step, Call call, const void* context);
  void help();
  void work();

  std::vector<std::thread> helpers_;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int count_ = 0, step_ = 1;
  alignas(64) std::atomic<uint32_t> loop_{0};   // odd while a loop is open
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> inside_{0};      // helpers that may touch the open loop
  alignas(64) std::atomic<int> asleep_{0};
};

// Calls body(token) for each token of a launch, which is little work: few are not worth sharing out, and of many a thread
// takes several at a time, as the others pay for each of its turns.
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
