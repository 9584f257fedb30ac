// What the kernels are written in, on a CPU: threads are fibers, barriers and shuffles are real, and the order in which
// threads run between them is drawn from a seed.
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

// Headers that declare these take a fifth of the time to compile a kernel.
extern "C" {
void* malloc(size_t);
float expf(float), exp2f(float), fmaf(float, float, float), fmaxf(float, float), log2f(float), sqrtf(float), tanhf(float);
}

#define DEVICE
#define SHARED
#define LOCAL
#define INLINE inline
#define SHARED_FLOATS(name, count) float* name = emulator::shared(__LINE__, count)
#define AFTER_OTHERS() {}
#define CONSTANT static constexpr

#define threadgroup_position_in_grid emulator::group
#define threadgroups_per_grid emulator::groups
#define simdgroup_index_in_threadgroup (emulator::current->number / 32)
#define thread_index_in_simdgroup (emulator::current->number % 32)

struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};

static void kernel_body();

namespace emulator {

constexpr int WARP = 32, MOST_THREADS = 1024;
constexpr size_t STACK = 256 * 1024;

// Where to go on: of registers only the compiler knows which it needs there.
typedef void* Place[5];

struct Thread {
  int number;
  bool begun, at_barrier, ended;
  Place place;
  char* stack;
};
struct Warp {
  float given[2][WARP];  // of this shuffle and of the one before, which slower lanes may still have to read
  int mask, arrived;
  unsigned shuffles;
};

static uint3 group, groups;
static Thread threads[MOST_THREADS];
static Warp warps[MOST_THREADS / WARP];
static Thread* current;
static int size, ended, at_barrier;
static Thread* ready[MOST_THREADS];  // the last one runs next
static int ready_count;
static Place host;
static const char* failure;
static uint64_t state;
alignas(16) static char memory[48 * 1024];
constexpr size_t MOST_LENT = 227 * 1024;
alignas(16) static char lent_memory[MOST_LENT];
static size_t lent;  // bytes of it that the launch asked for
static size_t used, most_shared = 32 * 1024;  // as on Metal
static void (*forget)() = nullptr;            // what else an earlier group may have left
static void (*arrive)() = nullptr;            // what is on its way and may arrive behind a barrier
static struct {
  int line;
  float* begin;
} arrays[16];
static int array_count;

inline unsigned drawn(unsigned below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return unsigned(state >> 33) % below;
}

inline void fail(const char* what) {
  failure = what;
  __builtin_longjmp(host, 1);
}

// The array that a line of the kernel declares: the same for all threads of the group. It begins as NaN.
inline float* shared(int line, int count) {
  for (int i = 0; i < array_count; ++i)
    if (arrays[i].line == line) return arrays[i].begin;
  if (used + count * sizeof(float) > most_shared) fail("more shared memory than Metal has");
  float* array = reinterpret_cast<float*>(memory + used);
  used += (count * sizeof(float) + 15) / 16 * 16;
  arrays[array_count++] = {line, array};
  return array;
}

// All that the launch asked for: the same for all threads of the group. It begins as NaN, too.
inline float* lent_floats(int count) {
  if (count * sizeof(float) > lent) fail("more shared memory than the launch asked for");
  return reinterpret_cast<float*>(lent_memory);
}

static void go_on();

static void enter() {
  for (;;) {
    kernel_body();
    current->ended = true;
    ++ended;
    go_on();
  }
}

static void begin(Thread* thread) {
  ucontext_t context;
  if (thread->stack == nullptr) thread->stack = static_cast<char*>(malloc(STACK));
  getcontext(&context);
  context.uc_stack.ss_sp = thread->stack;
  context.uc_stack.ss_size = STACK - thread->number * 832 % 16384;  // threads' frames lie in unlike lines of the cache
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  thread->begun = true;
  setcontext(&context);
}

static void make_ready(int from, int count) {
  Thread** added = ready + ready_count;
  ready_count += count;
  for (int i = 0; i < count; ++i) {
    const int other = state == 0 ? i : int(drawn(i + 1));
    added[i] = added[other];
    added[other] = &threads[from + count - 1 - i];
  }
}

// Not inlined: a jump does not lead into the function that it is in.
__attribute__((noinline)) static void run_next() {
  if (ready_count == 0) {
    if (ended == size) __builtin_longjmp(host, 1);
    fail(at_barrier > 0 ? "a barrier that some threads of the group never reach"
                        : "a shuffle that some lanes of the warp never reach");
  }
  current = ready[--ready_count];
  if (!current->begun) begin(current);
  __builtin_longjmp(current->place, 1);
}

// Lets others run. Who calls this has been put where it is made ready again.
static void go_on() {
  if (__builtin_setjmp(current->place) == 0) run_next();
}

static const char* run_group(uint64_t seed) {
  ended = at_barrier = ready_count = array_count = 0;
  used = 0;
  failure = nullptr;
  state = seed;
  memset(memory, 0xff, sizeof(memory));
  memset(lent_memory, 0xff, lent);
  for (int i = 0; i < size; ++i) {
    threads[i].number = i;
    threads[i].at_barrier = threads[i].ended = false;
  }
  for (auto& warp : warps) warp.arrived = 0;
  if (forget != nullptr) forget();
  if (__builtin_setjmp(host) == 0) {
    make_ready(0, size);
    run_next();
  }
  if (failure != nullptr)
    for (auto& thread : threads) thread.begun = false;  // they stand somewhere in the kernel
  return failure;
}

static const char* run_groups(const unsigned* counts, int threads_of_group, int lent_bytes, uint64_t seed) {
  groups = {counts[0], counts[1], counts[2]};
  size = threads_of_group;
  lent = size_t(lent_bytes);
  if (lent > MOST_LENT) return "more shared memory than a group may ask for";
  if (size % WARP != 0 || size > MOST_THREADS) return "a group is whole warps of 32, and at most 1024 threads";
  for (group.z = 0; group.z < groups.z; ++group.z)
    for (group.y = 0; group.y < groups.y; ++group.y)
      for (group.x = 0; group.x < groups.x; ++group.x) {
        if (const char* wrong = run_group(seed)) return wrong;
        if (seed != 0) seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      }
  return nullptr;
}

}  // namespace emulator

struct Brain {
  uint16_t bits;
  Brain() = default;
  explicit Brain(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
};
#ifdef __aarch64__
typedef __fp16 Half;  // which older compilers know there, too
#else
typedef _Float16 Half;
#endif

inline void group_barrier() {
  using namespace emulator;
  if (++at_barrier == size) {
    at_barrier = 0;
    make_ready(0, size);
  }
  go_on();
  if (arrive != nullptr) arrive();
}

inline float shuffle_xor(float x, int mask) {
  using namespace emulator;
  const int lane = current->number % WARP;
  Warp& warp = warps[current->number / WARP];
  if (warp.arrived == 0) warp.mask = mask;
  if (warp.mask != mask) fail("lanes of a warp in different shuffles");
  float(&given)[WARP] = warp.given[warp.shuffles & 1];
  given[lane] = x;
  if (++warp.arrived == WARP) {
    warp.arrived = 0;
    ++warp.shuffles;
    make_ready(current->number / WARP * WARP, WARP);
  }
  go_on();
  return given[lane ^ mask];
}

inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float from_half(uint32_t bits) {
  const uint16_t narrow = uint16_t(bits);
  Half x;
  memcpy(&x, &narrow, 2);
  return float(x);
}
inline float power_of_two(float x) { return exp2f(x); }
inline float logarithm_of_two(float x) { return log2f(x); }
inline float root(float x) { return sqrtf(x); }
inline float tangent(float x) { return tanhf(x); }
inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
inline float larger(float a, float b) { return fmaxf(a, b); }
inline float nothing() { return -__builtin_inff(); }
