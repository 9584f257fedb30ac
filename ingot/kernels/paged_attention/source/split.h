// One threadgroup of four warps takes PART queries of one row that share a head of keys and values, in tiles of sixteen, over one
// split of places, by matrix units: what it takes, where that lies, and what it has found so far, which is nothing yet.
//
// queries [tokens, heads, KEY_SIZE], numbers [2 + heads], table [...], rows [rows, 6], after [1] -> partial [tokens, heads,
// splits, VALUE_SIZE + 4], or where no row has more than one split -> attended [tokens, heads, VALUE_SIZE], as in `attend`
constexpr int HEADS = KV_HEADS * GROUP;
static_assert(WARPS == 4, "as many as share the columns of values");
constexpr int THREADS = WARPS * 32;
constexpr int TILES = PART / 16;
constexpr int SHARERS = WARPS / TILES;           // warps that share a tile's keys
constexpr int RUNS = KEYS / 8;                   // of eight keys in a piece
constexpr int OWN_RUNS = RUNS / SHARERS;         // of them a warp's own
constexpr int ADDED_RUNS = RUNS / WARPS;         // whose weights are added up one after another
constexpr int KEY_CHUNKS = KEY_SIZE / 8, VALUE_CHUNKS = VALUE_SIZE / 8;  // of 16 bytes
constexpr int COLUMNS = (VALUE_CHUNKS + WARPS - 1) / WARPS;              // chunks of a value that are a warp's own
constexpr int CHUNK = 4;                         // floats that take as much memory
constexpr int UNIT = 64;                         // places that lie one behind another, whatever a page is

// Rows of an odd number of chunks begin in other banks of memory, one after another.
constexpr int KEY_LINE = (KEY_CHUNKS | 1) * CHUNK, VALUE_LINE = (VALUE_CHUNKS | 1) * CHUNK, WEIGHT_LINE = (RUNS | 1) * CHUNK;
constexpr int SLOT = KEYS * (KEY_LINE > VALUE_LINE ? KEY_LINE : VALUE_LINE);
SHARED_FLOATS(ring, SLOTS * SLOT);
SHARED_FLOATS(weights, PART * WEIGHT_LINE);
SHARED_FLOATS(of_warps, WARPS * PART);  // largest scores, and in the end sums of weights
SHARED_FLOATS(factors, PART);           // of the sums until now, and in the end largest scores
SHARED_FLOATS(units, MOST_SPLIT / UNIT * 4);
const DEVICE T** found = (const DEVICE T**)units;  // keys and values of each unit

const int lane = int(thread_index_in_simdgroup);
const int warp = int(simdgroup_index_in_threadgroup), thread_number = warp * 32 + lane;
const int up = lane / 4, across = lane % 4;  // where a lane's numbers stand in the units
const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int length = rows[row * 6], first_page = rows[row * 6 + 1], first_query = rows[row * 6 + 2];
const int count = rows[row * 6 + 3], first_entry = rows[row * 6 + 4];
const int chunks = (rows[row * 6 + 5] * GROUP + PART - 1) / PART;
const int first = int(threadgroup_position_in_grid.x) % chunks * PART;
const int splits = int(threadgroups_per_grid.x) / chunks;

// Places are counted from the split's begin, from here on.
const int least = WINDOW > 0 && length - count + 1 > WINDOW ? length - count + 1 - WINDOW : 0;
const int number = int(threadgroup_position_in_grid.x) / chunks, split = SPLIT_AT(least) + number;
const int begin = SPLIT_BEGIN(split), end = SPLIT_BEGIN(split + 1);
int from = least > begin ? least - begin : 0;  // what is not looked at yet
const int to = (length < end ? length : end) - begin;
if (from >= to || first >= count * GROUP) {
  return;
}
const int first_limit = length - count + 1 - begin;  // what a query sees lies before its limit
const float scale = numbers[0], cap = numbers[1];

for (int unit = thread_number; unit < (end - begin) / UNIT; unit += THREADS) {
  if ((unit + 1) * UNIT > from && unit * UNIT < to) {
    const int place = begin + unit * UNIT, page = table[first_entry + place / PAGE - first_page];
    const DEVICE T* start;
#ifdef CODED_PAGES
    if (page < 0) {
      const DEVICE unsigned char* slab = ((const DEVICE unsigned char* const DEVICE*)coded)[~page >> 20];
      found[unit * 2] = (const DEVICE T*)(slab + ((size_t)(~page & 0xfffff) * KV_HEADS + head) * HEAD_BYTES);
      found[unit * 2 + 1] = nullptr;
      continue;
    }
#endif
    FIND_KEYS(start, page, head)
    found[unit * 2] = start + place % PAGE * KEY_SIZE;
    FIND_VALUES(start, page, head)
    found[unit * 2 + 1] = start + place % PAGE * VALUE_SIZE;
  }
}

float largest[2], total[WARPS / SHARERS][2];  // of the warp's own tile, and of its own keys
float sums[TILES][COLUMNS][4];                // of all tiles and the warp's own columns
largest[0] = largest[1] = nothing();
#pragma unroll
for (int i = 0; i < 8 / SHARERS; ++i) {
  total[i / 2][i % 2] = 0.0f;
}
#pragma unroll
for (int i = 0; i < TILES * COLUMNS * 4; ++i) {
  sums[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] = 0.0f;
}
group_barrier();
