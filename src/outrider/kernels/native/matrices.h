/* Products of matrices: two rows by two columns in one instruction, where the processor has one for bf16 and for bytes.
 *
 * An accumulator holds four sums: those of a row with two columns, and those of the row behind it with the same columns. Two words of
 * a row are two steps of a product, and so are two words of a column. Whole numbers are added exactly. For bf16 the instruction is
 * defined to add the two steps one after another, each with the roundings of add_pairs. So every sum has the bits that it has where its
 * row is multiplied alone. */
#ifndef OUTRIDER_MATRICES_H
#define OUTRIDER_MATRICES_H

#include "simd.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define MATRIX_DOTS 1 /* Whether there are such instructions. */

/* Two steps of a row, and the same steps of another. */
INLINE floats steps_of_two_rows(const float *first, const float *second) {
    return (floats)vcombine_f32(vld1_f32(first), vld1_f32(second));
}

/* Two steps of four columns, as [a, b]: of the first two columns, and of the other two. */
INLINE void part_columns(floats *a, floats *b) {
    const float32x4_t first = (float32x4_t)*a, second = (float32x4_t)*b;
    *a = (floats)vzip1q_f32(first, second);
    *b = (floats)vzip2q_f32(first, second);
}

/* The sums of two rows with four columns as accumulators: with the first two columns, and with the other two. Also turns them back. */
INLINE void turn_sums(floats *a, floats *b) {
    const float64x2_t first = (float64x2_t)*a, second = (float64x2_t)*b;
    *a = (floats)vzip1q_f64(first, second);
    *b = (floats)vzip2q_f64(first, second);
}

/* Adds the products of two steps of pairs of bf16. */
INLINE floats add_matrix_of_pairs(floats sum, floats rows, floats columns) {
    return (floats)vbfmmlaq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)rows), vreinterpretq_bf16_f32((float32x4_t)columns));
}

/* Adds the products of two steps of four bytes. */
INLINE int_lanes add_matrix_of_quads(int_lanes sum, floats rows, floats columns) {
    return (int_lanes)vmmlaq_s32((int32x4_t)sum, (int8x16_t)rows, (int8x16_t)columns);
}
#else
#define MATRIX_DOTS 0
#endif

#endif
