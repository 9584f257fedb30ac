// One threadgroup: one head of a page in fewer bits, as numbers that `attend_unpacked` reads. A thread takes eight neighbouring
// numbers at a time; a vector that was rotated is a warp's.
//
// pages [n] of coded ones, constants [16 + VALUE_SIZE], after [1], freed [...]: who reads what is written over has it by then ->
// keys [n, KV_HEADS, PAGE, KEY_SIZE] and values [n, KV_HEADS, PAGE, VALUE_SIZE], in place; done [1]
constexpr int KEY_EIGHTS = KEY_SIZE / 8, VALUE_EIGHTS = VALUE_SIZE / 8;
constexpr int SCALED = VALUE_GROUPS == 0 ? 1 : VALUE_GROUPS;
constexpr int EACH = VALUE_GROUPS == 0 ? VALUE_SIZE / 32 : 2;  // of a rotated vector's numbers, a lane's
const int number = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int lane = int(thread_index_in_simdgroup), warp = int(simdgroup_index_in_threadgroup), thread_number = warp * 32 + lane;
const int page = pages[number];
if (number == 0 && head == 0 && thread_number == 0) {
  done[0] = after[0] + 1;
}
const DEVICE unsigned char* from = ((const DEVICE unsigned char* const DEVICE*)coded)[page >> 20];
from += ((size_t)(page & 0xfffff) * KV_HEADS + head) * HEAD_BYTES;
const size_t first = ((size_t)number * KV_HEADS + head) * PAGE;

DEVICE T* to = (DEVICE T*)keys + first * KEY_SIZE;
for (int i = thread_number; i < PAGE * KEY_EIGHTS; i += THREADS) {
  const int key = i / KEY_EIGHTS, column = i % KEY_EIGHTS * 8;
  float eight[8], common[8];
  const DEVICE unsigned char* codes = from + KEY_CODES_AT + key * (KEY_SIZE * KEY_BITS / 8);
  spread_eight<KEY_BITS, KEY_SIZE, KEY_GROUPS>(eight, codes, from + KEY_SCALES_AT + key * (KEY_GROUPS * 4), column);
  Eight<T> centre;
  load_eight(centre, (const DEVICE T*)(from + CENTRE_AT) + column);
  widen(centre, common);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    eight[j] += common[j];
  }
  store_rounded(to + i * 8, eight);
}

to = (DEVICE T*)values + first * VALUE_SIZE;
if (VALUE_GROUPS != 0) {
  for (int i = thread_number; i < PAGE * VALUE_EIGHTS; i += THREADS) {
    const int value = i / VALUE_EIGHTS, column = i % VALUE_EIGHTS * 8;
    float eight[8];
    const DEVICE unsigned char* codes = from + VALUE_CODES_AT + value * (VALUE_SIZE * VALUE_BITS / 8);
    spread_eight<VALUE_BITS, VALUE_SIZE, SCALED>(eight, codes, from + VALUE_SCALES_AT + value * (SCALED * 4), column);
    store_rounded(to + i * 8, eight);
  }
} else {
  for (int value = warp; value < PAGE; value += THREADS / 32) {
    const DEVICE unsigned char* codes = from + VALUE_CODES_AT + value * (VALUE_SIZE / 2);
    const float length = size_of(brain_at(from + VALUE_SCALES_AT + value * 2));
    float own[EACH];
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) {
      const int both = codes[i * 32 + lane];
      own[i] = constants[both & 15] * length;
      own[i + EACH / 2] = constants[both >> 4] * length;
    }
    turn_own_back<EACH>(own, constants + 16, lane);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      to[value * VALUE_SIZE + i * 32 + lane] = T(own[i]);
    }
  }
}
