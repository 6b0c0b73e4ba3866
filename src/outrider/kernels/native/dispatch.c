/* What this processor can run. */
#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>

static int multiplies_bf16(void) { /* by number: older compilers have no name for it */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif

/* Bit 0: the generic kernels, which every processor runs; bit 1: AVX2 with FMA; bit 2: AVX-512; bit 3: AVX-512 with bf16. */
int64_t outrider_instruction_sets(void) {
    int64_t sets = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets |= 2;
    if ((sets & 2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        sets |= 4;
    if ((sets & 4) && multiplies_bf16()) sets |= 8;
#endif
    return sets;
}
