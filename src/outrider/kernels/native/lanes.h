/* What is chosen among the lanes of vectors: bounds, comparisons, tables and transposition. */
#ifndef OUTRIDER_LANES_H
#define OUTRIDER_LANES_H

#include "simd.h"

typedef int64_t long_lanes __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));

/* Each number, but not less than `least` and not more than `most`. What is not a number stays so. */
INLINE floats within(floats x, float least, float most) {
#if defined(__AVX512F__) /* Compilers turn masks into vectors and back. What is not a number passes as the second operand. */
    return (floats)_mm512_min_ps(_mm512_set1_ps(most), _mm512_max_ps(_mm512_set1_ps(least), (__m512)x));
#else
    const int_lanes small = (int_lanes)(x < least), large = (int_lanes)(x > most);
    const floats bounds = (floats)((small & (int_lanes)((floats){0} + least)) | (large & (int_lanes)((floats){0} + most)));
    return (floats)(((int_lanes)x & ~(small | large)) | (int_lanes)bounds);
#endif
}

/* a * b, and 0 where x is less than `least`. Where x is not a number, the product stays. */
INLINE floats product_or_zero(floats a, floats b, floats x, float least) {
#if defined(__AVX512F__)
    return (floats)_mm512_maskz_mul_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_NLT_UQ), (__m512)a, (__m512)b);
#else
    return (floats)((int_lanes)(a * b) & ~(int_lanes)(x < least));
#endif
}

/* The larger one of each pair of numbers, and b where one of them is not a number. */
INLINE floats larger_of(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    const int_lanes chosen = (int_lanes)(a > b);
    return (floats)((chosen & (int_lanes)a) | (~chosen & (int_lanes)b));
#endif
}

/* A bit for each lane of a comparison. */
INLINE unsigned int_lanes_set(int_lanes mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#else
    unsigned bits = 0;
    for (int lane = 0; lane < FLOAT_LANES; lane++) bits |= (unsigned)(mask[lane] & 1) << lane;
    return bits;
#endif
}

/* The same where the numbers are of double precision. */
INLINE unsigned long_lanes_set(long_lanes mask) {
#if defined(__AVX512F__)
    return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (unsigned)_mm256_movemask_pd((__m256d)mask);
#else
    unsigned bits = 0;
    for (int lane = 0; lane < FLOAT_LANES / 2; lane++) bits |= (unsigned)(mask[lane] & 1) << lane;
    return bits;
#endif
}

#if defined(__AVX512F__)
#define FLOAT_TABLES 1 /* Whether an instruction asks a table of floats for each lane. */
/* What a table of 16 numbers holds for the lower 4 bits of each code. */
INLINE floats floats_of_16(const float *table, uint_lanes codes) {
    return (floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
}

/* The same for a table of 32 numbers and 5 bits. */
INLINE floats floats_of_32(const float *table, uint_lanes codes) {
    return (floats)_mm512_permutex2var_ps(_mm512_loadu_ps(table), (__m512i)codes, _mm512_loadu_ps(table + 16));
}

#define QUARTERS 1 /* Whether vectors have four quarters, within which words can be exchanged. */
/* Transposes a vector's words of each of as many rows, from `byte` on. Quarters of rows that are four apart are read into one vector,
 * so that half as many shuffles are left, and each of them stays within its quarters. */
INLINE void transpose_quarters(const char *const *places, int64_t byte, floats *rows) {
    UNROLL for (int quarter = 0; quarter < 4; quarter++) {
        __m512i four[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const int64_t at = byte + 16 * quarter;
            __m512i read = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(places[i] + at)));
            read = _mm512_inserti32x4(read, _mm_loadu_si128((const __m128i *)(places[i + 4] + at)), 1);
            read = _mm512_inserti32x4(read, _mm_loadu_si128((const __m128i *)(places[i + 8] + at)), 2);
            four[i] = _mm512_inserti32x4(read, _mm_loadu_si128((const __m128i *)(places[i + 12] + at)), 3);
        }
        const __m512i low = _mm512_unpacklo_epi32(four[0], four[1]), high = _mm512_unpackhi_epi32(four[0], four[1]);
        const __m512i more_low = _mm512_unpacklo_epi32(four[2], four[3]), more_high = _mm512_unpackhi_epi32(four[2], four[3]);
        rows[4 * quarter] = (floats)_mm512_unpacklo_epi64(low, more_low);
        rows[4 * quarter + 1] = (floats)_mm512_unpackhi_epi64(low, more_low);
        rows[4 * quarter + 2] = (floats)_mm512_unpacklo_epi64(high, more_high);
        rows[4 * quarter + 3] = (floats)_mm512_unpackhi_epi64(high, more_high);
    }
}
#else
#define FLOAT_TABLES 0
#define QUARTERS 0
#endif

#endif
