// What the kernels are written in, on a CPU: threads are fibers, barriers and shuffles are real, and the order in which
// threads run between them is drawn from a seed.
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include <stdint.h>
#include <string.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

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

#define QUICK __attribute__((noinline, optimize("O2")))
#define MERGED __attribute__((always_inline)) inline

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
static Place host;    // of a failure
static Thread caller;  // goes on where all threads have ended
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

QUICK static void make_ready(int from, int count) {
  Thread** added = ready + ready_count;
  ready_count += count;
  for (int i = 0; i < count; ++i) {
    const int other = state == 0 ? i : int(drawn(i + 1));
    added[i] = added[other];
    added[other] = &threads[from + count - 1 - i];
  }
}

// The one that became ready last.
QUICK static Thread* next_thread() {
  if (ready_count == 0) {
    if (ended == size) return &caller;
    fail(at_barrier > 0 ? "a barrier that some threads of the group never reach"
                        : "a shuffle that some lanes of the warp never reach");
  }
  return current = ready[--ready_count];
}

static void enter();

inline char* top_of_stack(Thread* thread) {
  if (thread->stack == nullptr) thread->stack = static_cast<char*>(malloc(STACK));
  return thread->stack + STACK - thread->number * 832 % 16384;  // threads' frames lie in unlike lines of the cache
}

#ifdef __x86_64__
#ifdef __AVX512F__
#define REGISTERS_OF_AVX512                                                                                           \
  "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",         \
      "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7",
#else
#define REGISTERS_OF_AVX512
#endif

static void begin(Thread* thread) {
  thread->place[0] = reinterpret_cast<void*>(enter);
  thread->place[1] = top_of_stack(thread) - 8;  // aligned as behind a call
}

// Part of each function that uses it: processors predict that a call returns to where it came from, not to another thread.
MERGED void switch_to(Thread* next, void** from) {
  void** to = next->place;
  asm volatile(
      "leaq 1f(%%rip), %%rcx\n movq %%rcx, (%0)\n movq %%rsp, 8(%0)\n movq %%rbp, 16(%0)\n"
      "movq 8(%1), %%rsp\n movq 16(%1), %%rbp\n jmp *(%1)\n 1:"
      : "+a"(from), "+d"(to)
      :
      : "rbx", "rcx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
        "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
        REGISTERS_OF_AVX512 "memory", "cc");
}
#else
// Not inlined: a jump does not lead into the function that it is in.
__attribute__((noinline)) static void jump_to(void** place) { __builtin_longjmp(place, 1); }

static void enter_later() {
  if (__builtin_setjmp(current->place) == 0) jump_to(host);
  enter();
}

static void begin(Thread* thread) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_size = top_of_stack(thread) - thread->stack;
  context.uc_stack.ss_sp = thread->stack;
  context.uc_link = nullptr;
  makecontext(&context, enter_later, 0);
  current = thread;
  if (__builtin_setjmp(host) == 0) setcontext(&context);
}

inline void switch_to(Thread* next, void** from) {
  if (__builtin_setjmp(from) == 0) jump_to(next->place);
}
#endif

// Lets others run. Who calls this has been put where it is made ready again.
MERGED void go_on() {
  Thread* self = current;
  switch_to(next_thread(), self->place);
}

static void enter() {
  for (;;) {
    kernel_body();
    current->ended = true;
    ++ended;
    go_on();
  }
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
    if (!threads[i].begun) begin(&threads[i]);
    threads[i].begun = true;
  }
  for (auto& warp : warps) warp.arrived = 0;
  if (forget != nullptr) forget();
  if (__builtin_setjmp(host) == 0) {
    make_ready(0, size);
    switch_to(next_thread(), caller.place);
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

namespace emulator {
QUICK static void wait_for_group() {
  if (++at_barrier == size) {
    at_barrier = 0;
    make_ready(0, size);
  }
}

// Where all lanes' numbers of this shuffle are, once the last one has come.
QUICK static const float* give(float x, int mask) {
  Warp& warp = warps[current->number / WARP];
  if (warp.arrived == 0) warp.mask = mask;
  if (warp.mask != mask) fail("lanes of a warp in different shuffles");
  float* given = warp.given[warp.shuffles & 1];
  given[current->number % WARP] = x;
  if (++warp.arrived == WARP) {
    warp.arrived = 0;
    ++warp.shuffles;
    make_ready(current->number / WARP * WARP, WARP);
  }
  return given;
}
}  // namespace emulator

MERGED void group_barrier() {
  emulator::wait_for_group();
  emulator::go_on();
  if (emulator::arrive != nullptr) emulator::arrive();
}

MERGED float shuffle_xor(float x, int mask) {
  const float* given = emulator::give(x, mask);
  emulator::go_on();
  return given[emulator::current->number % emulator::WARP ^ mask];
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
