// Pages that were unpacked lie one behind another; numbers below 0 are theirs, -1 that of the first.
#undef FIND_KEYS
#undef FIND_VALUES
#define FIND_UNPACKED(found, page, unpacked, slab_of, size, head)                                \
  if ((page) < 0) {                                                                              \
    found = unpacked + ((size_t)~(page) * KV_HEADS + (head)) * (size_t)(PAGE * (size));          \
  } else                                                                                         \
    FIND_PAGE(found, page, slab_of, size, head)
#define FIND_KEYS(found, page, head) FIND_UNPACKED(found, page, unpacked_keys, KEYS_OF, KEY_SIZE, head)
#define FIND_VALUES(found, page, head) FIND_UNPACKED(found, page, unpacked_values, VALUES_OF, VALUE_SIZE, head)
