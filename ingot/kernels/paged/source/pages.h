// Where keys and values lie. A page is known by its slab and its number in there; EACH_SLAB names all slabs but the first.
#define CHOOSE_KEYS(n) slab_of_page = slab_number == n ? keys_##n : slab_of_page;
#define CHOOSE_VALUES(n) slab_of_page = slab_number == n ? values_##n : slab_of_page;
#define FIND_PAGE(found, page, choose, slab_0, size, head)                                                  \
  {                                                                                                         \
    const DEVICE T* slab_of_page = slab_0;                                                                  \
    const int slab_number = (page) >> 20;                                                                   \
    EACH_SLAB(choose)                                                                                       \
    found = slab_of_page + ((size_t)((page) & 0xfffff) * KV_HEADS + (head)) * (size_t)(PAGE * (size));      \
  }
#define FIND_KEYS(found, page, head) FIND_PAGE(found, page, CHOOSE_KEYS, keys_0, KEY_SIZE, head)
#define FIND_VALUES(found, page, head) FIND_PAGE(found, page, CHOOSE_VALUES, values_0, VALUE_SIZE, head)
