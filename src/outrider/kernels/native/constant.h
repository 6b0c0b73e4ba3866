/* A constant that Python writes down, too. A list of them ends with one that has no name. See kernels/layout.py. */
#ifndef OUTRIDER_CONSTANT_H
#define OUTRIDER_CONSTANT_H

#include <stdint.h>

typedef struct {
    const char *name;
    int64_t value;
} constant;

#endif
