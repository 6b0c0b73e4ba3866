/* What this processor can run. */
#include "constant.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>

static int multiplies_bf16(void) { /* by number: older compilers have no name for it */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif

enum { RUNS_GENERIC = 1, RUNS_AVX2 = 2, RUNS_AVX512 = 4, RUNS_AVX512BF16 = 8 };

/* The instruction sets that this processor runs, one bit each. Every processor runs the generic kernels; those for AVX2 need FMA,
 * too. */
int64_t outrider_instruction_sets(void) {
    int64_t sets = RUNS_GENERIC;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets |= RUNS_AVX2;
    if ((sets & RUNS_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        sets |= RUNS_AVX512;
    if ((sets & RUNS_AVX512) && multiplies_bf16()) sets |= RUNS_AVX512BF16;
#endif
    return sets;
}

const constant *outrider_constants(void) {
    static const constant list[] = {
        {"instruction set generic", RUNS_GENERIC},
        {"instruction set avx2", RUNS_AVX2},
        {"instruction set avx512", RUNS_AVX512},
        {"instruction set avx512bf16", RUNS_AVX512BF16},
        {NULL, 0},
    };
    return list;
}
