// One threadgroup: the keys and values of one head of one token, into their page.
//
// keys [tokens, KV_HEADS, KEY_SIZE], values [tokens, KV_HEADS, VALUE_SIZE], slots [tokens, 2] (page, place in it; a page below
// 0 is none), after [1] -> done [1]
const int token = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int thread_number = int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup);
const int page = slots[token * 2], place = slots[token * 2 + 1];
if (token == 0 && head == 0 && thread_number == 0) {
  done[0] = after[0] + 1;
}
if (page < 0) {
  return;
}
const DEVICE T* found;
FIND_KEYS(found, page, head)
DEVICE T* to = (DEVICE T*)found + place * KEY_SIZE;
for (int i = thread_number; i < KEY_SIZE; i += THREADS) {
  to[i] = keys[token * keys_strides[0] + head * keys_strides[1] + i * keys_strides[2]];
}
FIND_VALUES(found, page, head)
to = (DEVICE T*)found + place * VALUE_SIZE;
for (int i = thread_number; i < VALUE_SIZE; i += THREADS) {
  to[i] = values[token * values_strides[0] + head * values_strides[1] + i * values_strides[2]];
}
