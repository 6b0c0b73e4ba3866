/* This file holds all kernels for one instruction set, first in float and then in double. */
#include "constant.h"
#include "lanes.h"
#include "matrices.h"
#include "simd.h"
#include "team.h"
#include "words.h"

#define REAL float
#define REAL_IS_DOUBLE 0
#define REAL_NAME f32
#include "linear.inc"
#include "pack.inc"
#include "units.inc"
#include "rows.inc"
#include "product.inc"
#include "attention.inc"
#include "activation.inc"
#include "experts.inc"
#include "norm.inc"
#include "recurrence.inc"
#include "mixer.inc"
#include "decoder.inc"
#include "paged.inc"
#include "sampling.inc"
#include "layout.inc"
#include "undefine.inc"

#define REAL double
#define REAL_IS_DOUBLE 1
#define REAL_NAME f64
#include "linear.inc"
#include "pack.inc"
#include "units.inc"
#include "rows.inc"
#include "product.inc"
#include "attention.inc"
#include "activation.inc"
#include "experts.inc"
#include "norm.inc"
#include "recurrence.inc"
#include "mixer.inc"
#include "decoder.inc"
#include "paged.inc"
#include "sampling.inc"
#include "layout.inc"
