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

Pool::Pool(int threads) : lanes_(threads) {
  for (int own = 1; own < threads; own++) std::thread([this, own] { help(own); }).detach();
}

namespace {

constexpr int kCounted = 24;  // bits of `Lane::taken` that count; the others are so many that no number of a loop comes twice

}  // namespace

// The number of one of the lane's parts that nobody has taken, or -1.
int Pool::take(int lane) {
  std::atomic<uint64_t>& taken = lanes_[lane].taken;
  uint64_t seen = taken.load(std::memory_order_relaxed);
  for (;;) {
    // What is there from an earlier loop means none.
    const uint64_t before = seen >> kCounted == loop_ ? seen & ((1u << kCounted) - 1) : 0, after = loop_ << kCounted | (before + 1);
    const uint64_t part = lane + before * lanes_.size();
    if (part >= static_cast<uint64_t>(parts_)) return -1;
    if (taken.compare_exchange_weak(seen, after, std::memory_order_relaxed)) return static_cast<int>(part);
  }
}

void Pool::do_all_of(int lane) {
  for (int part; (part = take(lane)) >= 0;)
    for (int i = part * step_; i < std::min((part + 1) * step_, count_); i++) call_(context_, i);
}

// All at once, as each is far away.
void Pool::look_at_lanes() const {
  for (const Lane& lane : lanes_) __builtin_prefetch(&lane);
}

void Pool::work(int own) {
  do_all_of(own);
  look_at_lanes();
  const int threads = this->threads();
  for (int next = own + 1; next < own + threads; next++) do_all_of(next % threads);
}

void Pool::help(int own) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t now = open_.load(std::memory_order_acquire);
    for (int look = 0; now == seen && look < kLooks; look++) {
      pause();
      now = open_.load(std::memory_order_acquire);
    }
    if (now == seen) {
      asleep_.fetch_add(1);
      open_.wait(seen);
      asleep_.fetch_sub(1);
      continue;
    }
    seen = now;
    if (now % 2 == 0) continue;
    // Announce first, then look again: the caller closes the loop before it waits for those inside.
    lanes_[own].inside.store(true);
    if (open_.load() == now) work(own);
    lanes_[own].inside.store(false, std::memory_order_release);
  }
}

void Pool::run(int count, int step, Call call, const void* context) {
  if (count <= 1 || threads() == 1 || busy_.test_and_set(std::memory_order_acquire)) {
    for (int i = 0; i < count; i++) call(context, i);
    return;
  }
  call_ = call;
  context_ = context;
  count_ = count;
  step_ = std::max(step, count >> (kCounted - 1));
  parts_ = (count + step_ - 1) / step_;
  loop_++;
  open_.fetch_add(1);
  if (asleep_.load() > 0) open_.notify_all();
  work(0);
  open_.fetch_add(1);
  look_at_lanes();
  for (const Lane& lane : lanes_)
    while (lane.inside.load()) pause();
  busy_.clear(std::memory_order_release);
}

}  // namespace ingot
