#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>

namespace ingot {
namespace {

constexpr int kLooks = 2000;  // how often a helper looks for the next loop before it sleeps

int wanted_threads() {
  if (const char* asked = std::getenv("INGOT_THREADS")) {
    int count = std::atoi(asked);
    if (count > 0) return count;
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return 1;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

Pool& Pool::shared() {
  // Never destroyed: its threads sleep in the kernel until the process ends.
  static Pool* pool = new Pool(wanted_threads());
  return *pool;
}

Pool::Pool(int threads) {
  for (int i = 1; i < threads; i++) {
    helpers_.emplace_back([this] { help(); });
    helpers_.back().detach();
  }
}

void Pool::work() {
  for (int first; (first = next_.fetch_add(step_, std::memory_order_relaxed)) < count_;)
    for (int i = first; i < std::min(first + step_, count_); i++) call_(context_, i);
}

void Pool::help() {
  uint32_t seen = 0;
  for (;;) {
    uint32_t now = loop_.load(std::memory_order_acquire);
    for (int look = 0; now == seen && look < kLooks; look++) {
      pause();
      now = loop_.load(std::memory_order_acquire);
    }
    if (now == seen) {
      asleep_.fetch_add(1);
      loop_.wait(seen);
      asleep_.fetch_sub(1);
      continue;
    }
    seen = now;
    if (now % 2 == 0) continue;
    // Announce first, then look again: the caller closes the loop before it waits for those inside.
    inside_.fetch_add(1);
    if (loop_.load() == now) work();
    inside_.fetch_sub(1);
  }
}

void Pool::run(int count, int step, Call call, const void* context) {
  if (count <= 1 || helpers_.empty() || busy_.test_and_set(std::memory_order_acquire)) {
    for (int i = 0; i < count; i++) call(context, i);
    return;
  }
  call_ = call;
  context_ = context;
  count_ = count;
  step_ = step;
  next_.store(0);
  loop_.fetch_add(1);
  if (asleep_.load() > 0) loop_.notify_all();
  work();
  loop_.fetch_add(1);
  while (inside_.load(std::memory_order_acquire) != 0) pause();
  busy_.clear(std::memory_order_release);
}

}  // namespace ingot
