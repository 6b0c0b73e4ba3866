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
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#if defined(__AVX512BF16__)
#define ISA avx512bf16
#define BF16_DOTS 1
#define QUAD_DOTS 1
#else
#define ISA avx512
#endif
#define VECTOR_BYTES 64
#define TILE_ROWS 12 /* The accumulators of so many rows fit in the registers beside a panel of weights. */
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
#define ISA avx2vnni
#define QUAD_DOTS 1
#else
#define ISA avx2
#endif
#define VECTOR_BYTES 32
#define TILE_ROWS 6
#elif defined(__aarch64__)
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ISA neonbf16
#define BF16_DOTS 1
#elif defined(__ARM_FEATURE_DOTPROD)
#define ISA neondot
#else
#define ISA neon
#endif
#define VECTOR_BYTES 16
#define TILE_ROWS 12
#else
#define ISA generic
#define VECTOR_BYTES 16
#define TILE_ROWS 4
#endif

#ifndef BF16_DOTS
#define BF16_DOTS 0 /* Whether an instruction multiplies pairs of bf16. */
#endif
#ifndef QUAD_DOTS
#define QUAD_DOTS 0 /* Whether an instruction adds products of four bytes to a sum of 32 bits. */
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
enum { OPERAND_REAL = 0, OPERAND_PAIRS = 1, OPERAND_BYTES = 2 };

/* How pairs of bf16 are multiplied: by the instruction for them, or by the two products of floats that it stands for. The second
 * number of a pair comes first, and numbers nearer to 0 than normal ones are 0. So the bits are the same. */
enum { PAIRS_TOGETHER = 1, PAIRS_APART = 2 };
int pairs_are_slow(void); /* Whether the instruction takes longer than the two products do; see dispatch.c. */

/* What the numbers in blocks mean; see formats/blocks.inc. */
enum { VALUES_WHOLE = 0, VALUES_NL = 1, VALUES_MX = 2, VALUES_HALF = 3, VALUES_BF16 = 4 };
enum { SCALES_NONE = 0, SCALES_HALF = 1, SCALES_BF16 = 2 };
enum { LOWS_NONE = 0, LOWS_OF_BLOCKS = 1, LOWS_OF_PARTS = 2 };

/* All that the inner loops must know of a matrix in one number, which is a constant wherever they are expanded. */
enum { KIND_GROUPED = 64, KIND_ZEROS = 128, KIND_APART = 256 };
enum { OPERAND_APART = OPERAND_PAIRS | KIND_APART >> 4 }; /* in a kind only: pairs that are taken apart */
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
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

/* Rounds a number or a vector to what it holds, so that a product is not fused with the sum behind it. */
#if defined(__AVX512F__)
#define SETTLE(x) __asm__("" : "+v"(x))
#elif defined(__x86_64__)
#define SETTLE(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define SETTLE(x) __asm__("" : "+w"(x))
#else
#define SETTLE(x) __asm__("" : "+m"(x))
#endif

/* From here on takes numbers nearer to 0 than normal ones for 0, where that is wanted. Returns what keep_small needs to end it. */
INLINE unsigned flush_small(const int wanted) {
#if defined(__x86_64__)
    const unsigned control = wanted ? _mm_getcsr() : 0;
    if (wanted) _mm_setcsr(control | 0x8040);
    return control;
#else
    return (unsigned)wanted;
#endif
}

INLINE void keep_small(const int wanted, unsigned control) {
#if defined(__x86_64__)
    if (wanted) _mm_setcsr(control);
#else
    (void)wanted, (void)control;
#endif
}

/* The same number in every lane. A compiler adds it to a vector of zeros where it is told so, since -0 would become 0. */
INLINE floats splat(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (floats)((int_lanes){0} + bits);
}

#if defined(__aarch64__)
/* Four bytes that lie anywhere, in the lower half of the result. */
INLINE uint32x2_t four_bytes(const void *bytes) {
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return vdup_n_u32(word);
}
#endif

/* Turns bytes into floats. Compilers do this one byte at a time, although there is an instruction for all of them. */
INLINE floats floats_from_int8(const int8_t *bytes) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
#elif defined(__aarch64__)
    return (floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)four_bytes(bytes)))));
#else
    return (floats){bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

/* Bytes as whole numbers of 32 bits. By instruction: compilers make of the plain conversion a load and an insertion for each byte. */
INLINE int_lanes wide_bytes(const uint8_t *bytes) {
#if defined(__AVX512F__)
    return (int_lanes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
#elif defined(__AVX2__)
    return (int_lanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
#elif defined(__aarch64__)
    return (int_lanes)vmovl_u16(vget_low_u16(vmovl_u8((uint8x8_t)four_bytes(bytes))));
#else
    return (int_lanes){bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

INLINE floats floats_from_uint8(const uint8_t *bytes) { return __builtin_convertvector(wide_bytes(bytes), floats); }

INLINE floats floats_from_bf16(const uint16_t *values) {
#if defined(__AVX512F__)
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values)), 16);
#elif defined(__AVX2__)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values)), 16);
#elif defined(__aarch64__)
    return (floats)vshll_n_u16(vld1_u16(values), 16);
#else
    return (floats){float_from_bf16(values[0]), float_from_bf16(values[1]), float_from_bf16(values[2]),
                    float_from_bf16(values[3])};
#endif
}

/* Halves of IEEE in the lower bits of each lane, which are finite, as floats. Where no instruction does it, the exponent is moved by a
 * product that is exact for small numbers, too. */
INLINE floats floats_of_halves(uint_lanes halves) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
    uint_lanes bits = (halves & 0x7fffu) << 13;
    floats size;
    memcpy(&size, &bits, sizeof size);
    size *= 0x1p112f;
    memcpy(&bits, &size, sizeof bits);
    bits |= (halves & 0x8000u) << 16;
    memcpy(&size, &bits, sizeof size);
    return size;
#endif
}

/* The same for halves that lie together. */
INLINE floats floats_from_halves(const uint16_t *values) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)values));
#else
    typedef uint16_t few __attribute__((vector_size(VECTOR_BYTES / 2), aligned(1), may_alias));
    return floats_of_halves(__builtin_convertvector(*(const few *)values, uint_lanes));
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

/* The same, less 8: a nibble whose upper bit is turned has this value as a signed number of 4 bits. */
INLINE floats floats_from_middle_nibbles(const void *words, const int which) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (floats)_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), 4 * which), table);
#else
    const uint_lanes turned = *(const uint_lanes *)words ^ 0x88888888u;
    return __builtin_convertvector((int_lanes)(turned << (28 - 4 * which)) >> 28, floats);
#endif
}

#if BF16_DOTS
typedef uint16_t half_lanes __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));

/* Adds the products of pairs of bf16, whose other factors are the same pair for every lane. */
INLINE floats add_pairs(floats sum, floats weights, float pair) {
    int32_t bits;
    memcpy(&bits, &pair, sizeof bits);
#if defined(__AVX512F__)
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(bits));
#else
    const bfloat16x8_t factors = vreinterpretq_bf16_s32(vdupq_n_s32(bits));
    return (floats)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)weights), factors);
#endif
}

/* Rounds a vector of floats to bf16, and returns what was rounded as floats. */
INLINE floats bf16_from_floats(floats values, uint16_t *out) {
#if defined(__AVX512F__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
    memcpy(out, &rounded, sizeof rounded);
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)rounded), 16);
#else
    const uint16x4_t rounded = vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)values));
    memcpy(out, &rounded, sizeof rounded);
    return (floats)vshll_n_u16(rounded, 16);
#endif
}

#if defined(__AVX512F__)
/* Each number rounded to bf16. */
INLINE floats rounded_to_bf16(floats values) {
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)values)), 16);
}

/* The first numbers of pairs of bf16, and the second ones. */
INLINE floats first_of_pairs(floats pairs) { return (floats)((uint_lanes)pairs << 16); }
INLINE floats second_of_pairs(floats pairs) { return (floats)((uint_lanes)pairs & 0xffff0000u); }

INLINE floats neighbours_swapped(floats values) { return (floats)_mm512_permute_ps((__m512)values, 0xb1); }
#endif

/* Turns bytes for two vectors of floats into bf16, in their order. */
INLINE floats bf16_from_int8(const int8_t *bytes) {
    const floats first = floats_from_int8(bytes), second = floats_from_int8(bytes + FLOAT_LANES);
#if defined(__AVX512F__)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    floats found;
    memcpy(&found, &both, sizeof found);
    return found;
#else
    return (floats)vuzp2q_u16((uint16x8_t)first, (uint16x8_t)second); /* Whole numbers of 8 bits are bf16 already. */
#endif
}

/* Number i of the first vector and number i of the second in turn, i from 0 on in the lower half of both, or in the upper half. */
INLINE floats pairs_in_turn(floats a, floats b, const int upper) {
#if defined(__AVX512F__)
    const __m512i lower = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008,
                                           0x270007, 0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
    const __m512i in_turn = upper ? _mm512_add_epi16(lower, _mm512_set1_epi16(16)) : lower;
    return (floats)_mm512_permutex2var_epi16((__m512i)a, in_turn, (__m512i)b);
#else
    return (floats)(upper ? vzip2q_u16((uint16x8_t)a, (uint16x8_t)b) : vzip1q_u16((uint16x8_t)a, (uint16x8_t)b));
#endif
}

/* What a table of 32 numbers of bf16 holds for the lower 5 bits of each code. */
INLINE floats bf16_of_32(const uint16_t *table, half_lanes codes) {
#if defined(__AVX512F__)
    return (floats)_mm512_permutexvar_epi16((__m512i)codes, _mm512_loadu_si512(table));
#else
    const uint16x8_t bytes = vmlaq_n_u16(vdupq_n_u16(0x100), (uint16x8_t)(codes & 31), 0x202); /* the two of each number */
    return (floats)vqtbl4q_u8(vld1q_u8_x4((const uint8_t *)table), (uint8x16_t)bytes);
#endif
}

/* The same for a table of 64 numbers and 6 bits. */
INLINE floats bf16_of_64(const uint16_t *table, half_lanes codes) {
#if defined(__AVX512F__)
    return (floats)_mm512_permutex2var_epi16(_mm512_loadu_si512(table), (__m512i)codes, _mm512_loadu_si512(table + 32));
#else
    const uint8x16_t bytes = (uint8x16_t)vmlaq_n_u16(vdupq_n_u16(0x100), (uint16x8_t)(codes & 63), 0x202);
    const uint8x16_t first = vqtbl4q_u8(vld1q_u8_x4((const uint8_t *)table), bytes); /* It is zero behind the table, */
    const uint8x16_t rest = vsubq_u8(bytes, vdupq_n_u8(64));
    return (floats)vqtbx4q_u8(first, vld1q_u8_x4((const uint8_t *)(table + 32)), rest); /* and this stays as it is. */
#endif
}

/* The nibble `which` of each 16 bits of `words` as bf16, less 8. */
INLINE floats bf16_from_nibbles(const void *words, const int which) {
    static const uint16_t table[32] __attribute__((aligned(64))) = { /* -8 to 7, and again: the fifth bit is another nibble's */
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return bf16_of_32(table, *(const half_lanes *)words >> (4 * which));
}

/* The nibble `which` of each 16 bits of `words` as bf16, less a zero point of 0 to 15 for each lane. */
INLINE floats bf16_from_nibbles_less(const void *words, const int which, int_lanes zeros) {
    static const uint16_t table[32] __attribute__((aligned(64))) = { /* -16 to 15 */
        0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const half_lanes nibbles = *(const half_lanes *)words >> (4 * which) & 15;
    return bf16_of_32(table, nibbles + (16 - (half_lanes)zeros)); /* both halves of a lane hold its zero point */
}

/* Zero points of the columns of a vector, each in both halves of its lane. */
INLINE int_lanes zeros_of_pairs(const uint8_t *zeros) {
    const int_lanes wide = wide_bytes(zeros);
    return wide | wide << 16;
}
#endif

/* Whole numbers of 8 bits. Each lane of 32 bits holds four of them. Sums are exact, so all ways to add them have the same bits. */
typedef int16_t short_lanes __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));

enum { GROUP_NUMBERS = 2 }; /* of a group of a row in bytes: see rows.inc */
/* The numbers of a unit of a row in bytes, by which weights in blocks are multiplied: its scale; the scaled sums of the unit and of its
 * halves; and these sums in whole numbers, each with its sign turned. */
enum { ROW_SCALE = 0, SCALED_SUM = 1, SCALED_FIRST = 2, SCALED_SECOND = 3, LESS_SUM = 4, LESS_FIRST = 5, LESS_SECOND = 6, UNIT_NUMBERS = 8 };

/* What is added to signed weights, because the instruction for products of four bytes takes unsigned ones. */
#define BYTE_BIAS (QUAD_DOTS ? 128 : 0)

/* Adds the products of four weights and four numbers of a row to each lane. Weights of 4 bits are unsigned, those of 8 bits signed,
 * and where there is a bias they count as so much more. */
INLINE int_lanes add_quads(int_lanes sum, int_lanes weights, const int is_signed, const float *quad) {
    int32_t values;
    memcpy(&values, quad, sizeof values);
#if QUAD_DOTS
    if (is_signed) weights ^= (int_lanes){0} + (int32_t)0x80808080;
#if defined(__AVX512F__)
    return (int_lanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(values));
#else
    return (int_lanes)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(values));
#endif
#elif defined(__AVX512F__)
    /* Products of a pair of bytes fit 16 bits where one of them is at most 128 in size, as here. */
    const __m512i ones = _mm512_set1_epi16(1);
    __m512i size = (__m512i)weights, quads = _mm512_set1_epi32(values);
    if (is_signed) {
        quads = _mm512_mask_sub_epi8(quads, _mm512_movepi8_mask(size), _mm512_setzero_si512(), quads);
        size = _mm512_abs_epi8(size);
    }
    return sum + (int_lanes)_mm512_madd_epi16(_mm512_maddubs_epi16(size, quads), ones);
#elif defined(__AVX2__)
    const __m256i quads = _mm256_set1_epi32(values), ones = _mm256_set1_epi16(1);
    __m256i size = (__m256i)weights, turned = quads;
    if (is_signed) size = _mm256_abs_epi8(size), turned = _mm256_sign_epi8(quads, (__m256i)weights);
    return sum + (int_lanes)_mm256_madd_epi16(_mm256_maddubs_epi16(size, turned), ones);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (int_lanes)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)vdupq_n_s32(values));
#elif defined(__aarch64__)
    /* Two products of at most 128 and 127 in size fit 16 bits, so weights of 4 bits may count as signed, too. */
    const int8x16_t bytes = (int8x16_t)weights, quads = (int8x16_t)vdupq_n_s32(values);
    const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(quads)), high = vmull_high_s8(bytes, quads);
    return (int_lanes)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#else
    for (int i = 0; i < 32; i += 8) {
        const int32_t value = (int32_t)((uint32_t)values << (24 - i)) >> 24;
        const int_lanes raised = (int_lanes)((uint_lanes)weights << (24 - i));
        sum += (is_signed ? raised >> 24 : (int_lanes)((uint_lanes)raised >> 24)) * value;
    }
    return sum;
#endif
}

/* The bits of `upper` that are in the mask, over those of `lower`. */
INLINE int_lanes bits_of_both(int_lanes lower, int_lanes upper, int_lanes mask) {
#if defined(__AVX512F__)
    return (int_lanes)_mm512_ternarylogic_epi32((__m512i)lower, (__m512i)upper, (__m512i)mask, 0xf8);
#else
    return lower | (upper & mask);
#endif
}

/* What a table of 16 bytes holds for each byte of codes, which are below 16. */
INLINE int_lanes bytes_of_16(const int8_t *table, int_lanes codes) {
#if defined(__AVX512F__)
    const __m128i few = _mm_loadu_si128((const __m128i *)table);
    return (int_lanes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(few), (__m512i)codes);
#elif defined(__AVX2__)
    const __m128i few = _mm_loadu_si128((const __m128i *)table);
    return (int_lanes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(few), (__m256i)codes);
#elif defined(__aarch64__)
    return (int_lanes)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes);
#else
    int8_t bytes[VECTOR_BYTES];
    memcpy(bytes, &codes, sizeof bytes);
    for (int i = 0; i < VECTOR_BYTES; i++) bytes[i] = table[bytes[i]];
    memcpy(&codes, bytes, sizeof codes);
    return codes;
#endif
}

#if defined(__AVX2__) && !QUAD_DOTS
/* So many steps of weights of 4 bits are added in 16 bits: 8 times two products of 15 and 127 are 30480. */
#define SHORT_STEPS 8
INLINE short_lanes short_products(int_lanes weights, const float *values) {
    int32_t bytes;
    memcpy(&bytes, values, sizeof bytes);
#if defined(__AVX512F__)
    return (short_lanes)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(bytes));
#else
    return (short_lanes)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(bytes));
#endif
}

INLINE int_lanes add_shorts(int_lanes sum, short_lanes shorts) {
#if defined(__AVX512F__)
    return sum + (int_lanes)_mm512_madd_epi16((__m512i)shorts, _mm512_set1_epi16(1));
#else
    return sum + (int_lanes)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
#endif
}
#else
#define SHORT_STEPS 0
#endif

/* Rounds to whole numbers, and from the middle to even ones. */
INLINE int_lanes rounded(floats values) {
#if defined(__AVX512F__)
    return (int_lanes)_mm512_cvtps_epi32((__m512)values);
#elif defined(__AVX2__)
    return (int_lanes)_mm256_cvtps_epi32((__m256)values);
#elif defined(__SSE2__)
    return (int_lanes)_mm_cvtps_epi32((__m128)values);
#elif defined(__aarch64__)
    return (int_lanes)vcvtnq_s32_f32((float32x4_t)values);
#else
    int_lanes found;
    for (int i = 0; i < FLOAT_LANES; i++) found[i] = (int32_t)rintf(values[i]);
    return found;
#endif
}

/* Writes whole numbers that fit a byte. */
INLINE void write_bytes(int_lanes whole, int8_t *bytes) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)bytes, _mm512_cvtepi32_epi8((__m512i)whole));
#else
    typedef int8_t narrow __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1)));
    const narrow few = __builtin_convertvector(whole, narrow);
    memcpy(bytes, &few, sizeof few);
#endif
}

/* sum + a * b, rounded once on every processor. */
INLINE floats fused_everywhere(floats a, floats b, floats sum) {
#if defined(__AVX2__) || defined(__aarch64__)
    return fused(a, b, sum);
#else
    floats found;
    for (int i = 0; i < FLOAT_LANES; i++) found[i] = fmaf(a[i], b[i], sum[i]);
    return found;
#endif
}

#endif
