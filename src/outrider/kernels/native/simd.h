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

enum { WEIGHTS_REAL = 0, WEIGHTS_BF16 = 1, WEIGHTS_INT8 = 2 };
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

#endif
