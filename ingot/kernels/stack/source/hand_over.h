// One thread: tells the other stream that all is posted, and waits until that has done its part.
//
// posted [1]; number [1]: of the step; flags [4]: the addresses of two words -> done [1]
if (thread_index_in_simdgroup == 0) {
  unsigned int* const* words = (unsigned int* const*)flags;
  const unsigned int step = (unsigned int)number[0];
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(words[0]), "r"(step) : "memory");
  unsigned int reached;
  unsigned long long began, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(reached) : "l"(words[1]) : "memory");
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - began > LONGEST * 1000000000ull) {
      asm volatile("trap;");
    }
  } while (int(reached - step) < 0);
  done[0] = posted[0] + 1;
}
