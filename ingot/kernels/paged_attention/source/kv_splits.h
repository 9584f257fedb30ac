// KV splits: the first eight are of SPLIT places, and where they GROW the next eight of twice as many, and all others of four
// times as many. So a short row is read by many threadgroups, and a long one is not cut into too many pieces. Where a split
// begins depends on nothing but its number.
#define MOST_SPLIT (GROW ? 4 * SPLIT : SPLIT)
#define SPLIT_AT(place)                                     \
  (!GROW || (place) < 8 * SPLIT ? (place) / (SPLIT + !SPLIT)  \
   : (place) < 24 * SPLIT ? 4 + (place) / (2 * SPLIT + !SPLIT) \
                          : 10 + (place) / (4 * SPLIT + !SPLIT))
#define SPLIT_BEGIN(number)                         \
  (!GROW || (number) < 8 ? (number) * SPLIT         \
   : (number) < 16 ? ((number) - 4) * 2 * SPLIT     \
                   : ((number) - 10) * 4 * SPLIT)
