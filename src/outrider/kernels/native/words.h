/* Moves words of one size between rows and the columns of a panel: between matrices as they are stored and packed ones.
 *
 * A panel is a run of steps, and a step holds one word for each column. So packing transposes. It goes by blocks of a cache line
 * of every row, which stay in the innermost cache until all their words are moved.
 */
#ifndef OUTRIDER_WORDS_H
#define OUTRIDER_WORDS_H

#include <stdint.h>
#include <string.h>

enum { LINE_BYTES = 64 };

/* Where a column's word lies in its step. Where two halves are folded, column i lies beside column i + half. */
static inline int64_t word_place(int column, int columns, int folded) {
    if (!folded) return column;
    return column < columns / 2 ? 2 * column : 2 * (column - columns / 2) + 1;
}

#define MOVE_WORDS(word)                                                                                                 \
    /* Packs the first words of some rows into a panel. Columns that have no row are zero. */                           \
    static inline void pack_##word(const char *const *rows, int count, int64_t steps, int columns, int folded, void *panel) { \
        const int64_t at_once = LINE_BYTES / (int64_t)sizeof(word);                                                      \
        for (int64_t first = 0; first < steps; first += at_once) {                                                       \
            const int64_t last = first + at_once < steps ? first + at_once : steps;                                      \
            for (int column = 0; column < columns; column++) {                                                           \
                word *to = (word *)panel + word_place(column, columns, folded);                                          \
                for (int64_t k = first; k < last; k++) {                                                                 \
                    word value = 0;                                                                                      \
                    if (column < count) memcpy(&value, rows[column] + k * (int64_t)sizeof(word), sizeof value);          \
                    to[k * columns] = value;                                                                             \
                }                                                                                                        \
            }                                                                                                            \
        }                                                                                                                \
    }                                                                                                                    \
    /* Writes a panel's words back to its rows. */                                                                       \
    static inline void unpack_##word(const void *panel, int count, int64_t steps, int columns, int folded, char *const *rows) { \
        const int64_t at_once = LINE_BYTES / (int64_t)sizeof(word);                                                      \
        for (int64_t first = 0; first < steps; first += at_once) {                                                       \
            const int64_t last = first + at_once < steps ? first + at_once : steps;                                      \
            for (int column = 0; column < count; column++) {                                                             \
                const word *from = (const word *)panel + word_place(column, columns, folded);                            \
                for (int64_t k = first; k < last; k++)                                                                   \
                    memcpy(rows[column] + k * (int64_t)sizeof(word), &from[k * columns], sizeof(word));                  \
            }                                                                                                            \
        }                                                                                                                \
    }

MOVE_WORDS(uint8_t)
MOVE_WORDS(uint16_t)
MOVE_WORDS(uint32_t)
MOVE_WORDS(uint64_t)

#endif
