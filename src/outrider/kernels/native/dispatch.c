/* What this processor can run. */
#include "constant.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Asked by number: older compilers have no names for the newer features, and some runtimes of clang answer no to all. */
static unsigned feature_words(unsigned leaf, unsigned part, int word) {
    unsigned words[4] = {0, 0, 0, 0};
    __get_cpuid_count(leaf, part, &words[0], &words[1], &words[2], &words[3]);
    return words[word];
}

/* Which registers the system saves when it switches threads: bits of the processor's register XCR0. */
static unsigned saved_registers(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

enum { EAX = 0, EBX = 1, ECX = 2, EDX = 3 };
enum { FMA = 1u << 12, OSXSAVE = 1u << 27 };                                             /* leaf 1, ECX */
enum { AVX2 = 1u << 5, AVX512F = 1u << 16, AVX512DQ = 1u << 17, AVX512BW = 1u << 30 }; /* leaf 7, EBX */
#define AVX512VL (1u << 31)
enum { AVX512VNNI = 1u << 11 }; /* leaf 7, ECX */
enum { AVXVNNI = 1u << 4, AVX512BF16 = 1u << 5 }; /* leaf 7 part 1, EAX */
enum { AVX512FP16 = 1u << 23 }; /* leaf 7, EDX */
enum { GENU = 0x756e6547 };     /* leaf 0, EBX, of GenuineIntel */
enum { SAVES_YMM = 0x06, SAVES_ZMM = 0xe6 };
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

/* Asked by number, too: the word of the vector, and the bit of the word. */
static int has_dots(void) { return getauxval(16) >> 20 & 1; }
static int has_bf16(void) { return getauxval(26) >> 13 & getauxval(26) >> 14 & 1; }
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static int has_feature(const char *name) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, NULL, 0) == 0 && found;
}

static int has_dots(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static int has_bf16(void) { return has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16"); }
#elif defined(__aarch64__)
static int has_dots(void) { return 0; }
static int has_bf16(void) { return 0; }
#endif

enum { RUNS_GENERIC = 1, RUNS_AVX2 = 2, RUNS_AVX2VNNI = 4, RUNS_AVX512 = 8, RUNS_AVX512BF16 = 16 };
enum { RUNS_NEON = 32, RUNS_NEONDOT = 64, RUNS_NEONBF16 = 128 };

/* The instruction sets that this processor runs, one bit each. Every processor runs the generic kernels, every ARM of 64 bits those
 * for NEON; those for AVX2 need FMA, too. */
int64_t outrider_instruction_sets(void) {
    int64_t sets = RUNS_GENERIC;
#if defined(__x86_64__)
    const unsigned basic = feature_words(1, 0, ECX), vectors = feature_words(7, 0, EBX);
    const unsigned wide = AVX512F | AVX512DQ | AVX512BW | AVX512VL;
    const unsigned saved = basic & OSXSAVE ? saved_registers() : 0;
    if ((basic & FMA) && (vectors & AVX2) && (saved & SAVES_YMM) == SAVES_YMM) sets |= RUNS_AVX2;
    if ((sets & RUNS_AVX2) && (feature_words(7, 1, EAX) & AVXVNNI)) sets |= RUNS_AVX2VNNI;
    if ((sets & RUNS_AVX2) && (vectors & wide) == wide && (saved & SAVES_ZMM) == SAVES_ZMM) sets |= RUNS_AVX512;
    if ((sets & RUNS_AVX512) && (feature_words(7, 0, ECX) & AVX512VNNI) && (feature_words(7, 1, EAX) & AVX512BF16))
        sets |= RUNS_AVX512BF16; /* Every processor that multiplies pairs of bf16 multiplies quads of bytes, too. */
#elif defined(__aarch64__)
    sets |= RUNS_NEON;
    if (has_dots()) sets |= RUNS_NEONDOT;
    if ((sets & RUNS_NEONDOT) && has_bf16()) sets |= RUNS_NEONBF16; /* and products of matrices of bytes */
#endif
    return sets;
}

/* 0 or 1 where a test has chosen. */
int outrider_pairs_apart = -1;

/* Intel's processors from Sapphire Rapids on take two cycles for a vector of products of pairs, and half a cycle for a vector of
 * products of floats. Those of AMD take no longer for the one than for the other. Asking is slow in virtual machines. */
int pairs_are_slow(void) {
#if defined(__x86_64__)
    if (outrider_pairs_apart < 0) outrider_pairs_apart = feature_words(0, 0, EBX) == GENU && (feature_words(7, 0, EDX) & AVX512FP16);
#endif
    return outrider_pairs_apart > 0;
}

const constant *outrider_constants(void) {
    static const constant list[] = {
        {"instruction set generic", RUNS_GENERIC},
        {"instruction set avx2", RUNS_AVX2},
        {"instruction set avx2vnni", RUNS_AVX2VNNI},
        {"instruction set avx512", RUNS_AVX512},
        {"instruction set avx512bf16", RUNS_AVX512BF16},
        {"instruction set neon", RUNS_NEON},
        {"instruction set neondot", RUNS_NEONDOT},
        {"instruction set neonbf16", RUNS_NEONBF16},
        {NULL, 0},
    };
    return list;
}
