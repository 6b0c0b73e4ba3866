/* What this processor can run. */
#include <stdint.h>

/* Bit 0: the generic kernels, which every processor runs; bit 1: AVX2 with FMA; bit 2: AVX-512. */
int64_t outrider_instruction_sets(void) {
    int64_t sets = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets |= 2;
    if ((sets & 2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        sets |= 4;
#endif
    return sets;
}
