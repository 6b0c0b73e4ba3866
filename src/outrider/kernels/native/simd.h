/* Vectors of one width per instruction set, and the few operations the kernels need on them.
 *
 * Every source that includes this is compiled once for each instruction set with its own flags (see hatch_build.py), and the
 * right one is chosen at run time. The code is written in the compilers' generic vector types, so that a path differs from
 * another in the width of its vectors, and in nothing else but this: where there is an instruction for products of bf16, rows are
 * rounded to bf16 before they are multiplied with bf16 weights.
 */
#ifndef OUTRIDER_SIMD_H
#define OUTRIDER_SIMD_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#if defined(__AVX512BF16__)
#define ISA avx512bf16
#define BF16_DOTS 1
#else
#define ISA avx512
#endif
#define VECTOR_BYTES 64
#define TILE_ROWS 12 /* The accumulators of so many rows fit in the registers beside a panel of weights. */
#elif defined(__AVX2__)
#define ISA avx2
#define VECTOR_BYTES 32
#define TILE_ROWS 6
#else
#define ISA generic
#define VECTOR_BYTES 16
#define TILE_ROWS 4
#endif

#ifndef BF16_DOTS
#define BF16_DOTS 0 /* Whether an instruction multiplies pairs of bf16. */
#endif

#define JOIN3_(a, b, c) a##_##b##_##c
#define JOIN3(a, b, c) JOIN3_(a, b, c)
/* NAME(pack) is pack_f32_avx2 where REAL_NAME is f32. */
#define NAME(base) JOIN3(base, REAL_NAME, ISA)

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* How weights are stored, and as what rows enter a product with them; see kernels/formats and kernels/layout.py. */
enum { FORMAT_REAL = 0, FORMAT_BF16 = 1, FORMAT_INT8 = 2, FORMAT_INT4 = 3, FORMAT_BLOCKS = 4 };
enum { OPERAND_REAL = 0, OPERAND_PAIRS = 1 };

/* What the numbers in blocks mean; see formats/blocks.inc. */
enum { VALUES_WHOLE = 0, VALUES_NL = 1, VALUES_MX = 2, VALUES_HALF = 3, VALUES_BF16 = 4 };
enum { SCALES_NONE = 0, SCALES_HALF = 1, SCALES_BF16 = 2 };
enum { LOWS_NONE = 0, LOWS_OF_BLOCKS = 1, LOWS_OF_PARTS = 2 };

/* All that the inner loops must know of a matrix in one number, which is a constant wherever they are expanded. */
enum { KIND_GROUPED = 64, KIND_ZEROS = 128 };
#define KIND(format, operand) ((format) | (operand) << 4)
#define FORMAT_OF(kind) ((kind) & 15)
#define OPERAND_OF(kind) ((kind) >> 4 & 3)
#define DIGIT_BITS 11 /* A radix selection looks at so many bits at a time. */
#define DIGITS (1 << DIGIT_BITS)

/* How a layer of a decoder is described; see kernels/layout.py. */
enum { NORM_NONE = 0, NORM_RMS = 1, NORM_LAYER = 2 };
enum { FEED_FORWARD_PLAIN = 0, FEED_FORWARD_GATED = 1, FEED_FORWARD_EXPERTS = 2 };
enum {
    ACTIVATION_SILU = 0,
    ACTIVATION_GELU_TANH = 1,
    ACTIVATION_GELU = 2,
    ACTIVATION_QUICK_GELU = 3,
    ACTIVATION_RELU = 4,
    ACTIVATION_RELU_SQUARED = 5
};

INLINE uint16_t bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 64u); /* It stays what is not a number. */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16); /* Rounds to the nearest, and from the middle to even. */
}

INLINE float float_from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* Vectors of float, and the operations on them for which compilers need to be told the instruction. */
typedef float floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t int_lanes __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t uint_lanes __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
#define FLOAT_LANES ((int)(VECTOR_BYTES / sizeof(float)))

/* sum + a * b, rounded once where the processor can. Compilers fuse the two only where they stand in one block of code, and where
 * that is they decide anew in each version. */
INLINE floats fused(floats a, floats b, floats sum) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* Turns bytes into floats. Compilers do this one byte at a time, although there is an instruction for all of them. */
INLINE floats floats_from_int8(const int8_t *bytes) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
#else
    return (floats){bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

INLINE floats floats_from_uint8(const uint8_t *bytes) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
#else
    return (floats){bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

INLINE floats floats_from_bf16(const uint16_t *values) {
#if defined(__AVX512F__)
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values)), 16);
#elif defined(__AVX2__)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values)), 16);
#else
    return (floats){float_from_bf16(values[0]), float_from_bf16(values[1]), float_from_bf16(values[2]),
                    float_from_bf16(values[3])};
#endif
}

/* The nibble `which` of each lane of `words`, from 0 to 15, as float. `which` is a constant wherever this is expanded. */
INLINE floats floats_from_nibbles(const void *words, const int which) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (floats)_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), 4 * which), table); /* by 4 bits */
#else
    const uint_lanes nibbles = *(const uint_lanes *)words >> (4 * which) & 15;
    return __builtin_convertvector((int_lanes)nibbles, floats);
#endif
}

#if BF16_DOTS
/* Adds the products of pairs of bf16, whose other factors are the same pair for every lane. */
INLINE floats add_pairs(floats sum, floats weights, float pair) {
    int32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(bits));
}

/* Rounds a vector of floats to bf16. */
INLINE void bf16_from_floats(floats values, uint16_t *out) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
    memcpy(out, &rounded, sizeof rounded);
}

/* Turns 32 bytes into bf16, in their order. */
INLINE floats bf16_from_int8(const int8_t *bytes) {
    const floats first = floats_from_int8(bytes), second = floats_from_int8(bytes + 16);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    floats found;
    memcpy(&found, &both, sizeof found);
    return found;
}

/* The nibble `which` of each 16 bits of `words` as bf16, less 8. */
INLINE floats bf16_from_nibbles(const void *words, const int which) {
    static const uint16_t table[32] __attribute__((aligned(64))) = { /* -8 to 7, and again: the fifth bit is another nibble's */
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i shifted = _mm512_srli_epi16(_mm512_loadu_si512(words), 4 * which);
    return (floats)_mm512_permutexvar_epi16(shifted, _mm512_load_si512(table));
}

/* The nibble `which` of each 16 bits of `words` as bf16, less a zero point of 0 to 15 for each lane. */
INLINE floats bf16_from_nibbles_less(const void *words, const int which, int_lanes zeros) {
    static const uint16_t table[32] __attribute__((aligned(64))) = { /* -16 to 15 */
        0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i shifted = _mm512_srli_epi16(_mm512_loadu_si512(words), 4 * which);
    const __m512i nibbles = _mm512_and_si512(shifted, _mm512_set1_epi16(15));
    const __m512i from = _mm512_sub_epi16(_mm512_set1_epi16(16), (__m512i)zeros); /* both halves of a lane hold its zero point */
    return (floats)_mm512_permutexvar_epi16(_mm512_add_epi16(nibbles, from), _mm512_load_si512(table));
}

/* Zero points of 16 columns, each in both halves of its lane. */
INLINE int_lanes zeros_of_pairs(const uint8_t *zeros) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)zeros));
    return (int_lanes)_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
}
#endif

#endif
