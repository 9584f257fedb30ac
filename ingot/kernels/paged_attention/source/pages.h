// Where keys and values lie. A page is known by its slab and its number in there; KEYS_OF and VALUES_OF find the slab.
#define FIND_PAGE(found, page, slab_of, size, head)                                                         \
  {                                                                                                         \
    const DEVICE T* slab;                                                                                   \
    slab_of(slab, (page) >> 20)                                                                             \
    found = slab + ((size_t)((page) & 0xfffff) * KV_HEADS + (head)) * (size_t)(PAGE * (size));              \
  }
#define FIND_KEYS(found, page, head) FIND_PAGE(found, page, KEYS_OF, KEY_SIZE, head)
#define FIND_VALUES(found, page, head) FIND_PAGE(found, page, VALUES_OF, VALUE_SIZE, head)
