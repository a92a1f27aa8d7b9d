/* From raw memory of any dtype to the state of a block of it, or to counts in bins. Included by _native.c once for each instruction set. */

#define T float
#define LOOK Look
#define LANES 16
#define LARGEST FLT_MAX
#define LANE_INTEGER int32_t
/* Squares below 1e-38 lose digits or vanish; a whole block of them makes less than 1e-34. */
#define TINY 1e-27
#define FABS fabsf

#define S float
#define WIDEN(s) (s)
#define NAME(x) ISA(x##_float)
#define STRETCHES
#ifdef LOOK_AT_FLOAT
#define LOOK_AT LOOK_AT_FLOAT
#endif
#include "_native_block.h"

#define S uint16_t
#define WIDEN(s) widen_bfloat16(s)
#define IS_ZERO(s) (((s) & 0x7fff) == 0)
#define NAME(x) ISA(x##_bfloat16)
#define STRETCHES
#ifdef LOOK_AT_BFLOAT16
#define LOOK_AT LOOK_AT_BFLOAT16
#endif
#include "_native_block.h"

#ifdef LOOK_AT_FLOAT16
#define S uint16_t
#define WIDEN(s) widen_float16(s)
#define IS_ZERO(s) (((s) & 0x7fff) == 0)
#define NAME(x) ISA(x##_float16)
#define LOOK_AT LOOK_AT_FLOAT16
#include "_native_block.h"
#endif

#undef T
#undef LOOK
#undef LANES
#undef LARGEST
#undef LANE_INTEGER
#undef TINY
#undef FABS

#define T double
#define LOOK WideLook
#define LANES 8
#define LARGEST DBL_MAX
#define LANE_INTEGER int64_t
/* As above: below 1e-308. */
#define TINY 1e-280
#define FABS fabs

#define S double
#define WIDEN(s) (s)
#define NAME(x) ISA(x##_double)
#include "_native_block.h"

#ifdef LOOK_AT_INT64
#define S int64_t
#define WIDEN(s) ((double)(s))
#define IS_ZERO(s) ((s) == 0)
#define NAME(x) ISA(x##_int64)
#define LOOK_AT LOOK_AT_INT64
#include "_native_block.h"
#endif

#undef T
#undef LOOK
#undef LANES
#undef LARGEST
#undef LANE_INTEGER
#undef TINY
#undef FABS

/* Whole groups the fast way, what is left the careful way. */
#define STATE_OF(suffix, group, x, n)                                                                   \
    do {                                                                                                          \
        const size_t whole = (n) - (n) % (group);                                                                 \
        State rest;                                                                                               \
        if (whole)                                                                                                \
            ISA(block_##suffix)((x), whole, out, before);                                     \
        if (whole < (n)) {                                                                                        \
            ISA(careful_##suffix)((x) + whole, (n) - whole, whole ? &rest : out);                                 \
            if (whole)                                                                                            \
                merge(out, &rest);                                                                                \
        }                                                                                                         \
    } while (0)

#include "_halves_isa.h"

#define EACH(from, expression)                                                                                    \
    do {                                                                                                          \
        const from *given = (const from *)raw;                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                          \
            const from v = given[i];                                                                              \
            made[i] = (expression);                                                                               \
        }                                                                                                         \
    } while (0)

/* Numbers that float holds exactly, as float. */
TARGET static void ISA(floats)(int dtype, const char *raw, size_t n, float *made)
{
    switch (dtype) {
    case FLOAT16:
        ISA(halves)((const uint16_t *)raw, made, n);
        break;
    case BFLOAT16:
        EACH(uint16_t, widen_bfloat16(v));
        break;
    case INT8:
        EACH(int8_t, (float)v);
        break;
    case UINT8:
        EACH(uint8_t, (float)v);
        break;
    case INT16:
        EACH(int16_t, (float)v);
        break;
    case BOOL:
        EACH(uint8_t, v ? 1.0f : 0.0f);
        break;
    }
}

/* Numbers that float would round, as double. */
TARGET static void ISA(doubles)(int dtype, const char *raw, size_t n, double *made)
{
    if (dtype == INT32)
        EACH(int32_t, (double)v);
    else
        EACH(int64_t, (double)v);
}

#ifndef LOOK_AT_INT64
/* 64-bit integers as doubles, where all are below 2^51 in size: added to the bits of 1.5 * 2^52 they are its last
 * digits. (Few processors convert them at once.) */
TARGET static int ISA(short_integers)(const int64_t *given, size_t n, double *made)
{
    uint64_t beyond = 0;
    for (size_t i = 0; i < n; i++) {
        beyond |= (uint64_t)given[i] + (UINT64_C(1) << 51);
        const union {
            uint64_t bits;
            double number;
        } moved = {(uint64_t)given[i] + UINT64_C(0x4338000000000000)};
        made[i] = moved.number - 0x1.8p52;
    }
    return beyond >> 52 == 0;
}
#endif

/* 64-bit integers beyond what double counts one by one, but near each other: as distances from the smallest. */
TARGET static int ISA(distances)(const int64_t *given, size_t n, double *made, int64_t *from)
{
    int64_t low = given[0], high = given[0];
    for (size_t i = 0; i < n; i++) {
        low = given[i] < low ? given[i] : low;
        high = given[i] > high ? given[i] : high;
    }
    const uint64_t apart = (uint64_t)high - (uint64_t)low;
    if ((low >= -DOUBLE_COUNTS && high <= DOUBLE_COUNTS) || apart > (uint64_t)DOUBLE_COUNTS)
        return 0;
    *from = low;
    for (size_t i = 0; i < n; i++)
        made[i] = (double)(int64_t)((uint64_t)given[i] - (uint64_t)low);
    return 1;
}

/* The state of numbers of one sign, all larger than DOUBLE_COUNTS or so, from that of their distances. */
TARGET static void ISA(move_by)(int64_t from, State *state)
{
    const double whole = (double)from;
    const double left = whole < 0x1p63 ? (double)(from - (int64_t)whole) : (double)(from - INT64_MAX) - 1;
    const double mean = state->mean, rest = state->rest, sum = state->l1;
    set_mean(state, whole, mean);
    set_mean(state, state->mean, state->rest + left + rest);
    state->low += whole;
    state->high += whole;
    state->l1 = fabs(whole * state->count + sum);
    state->zeros = 0;
}

/* Bytes: all sums are integers, so that nothing is rounded and no center is needed. */
#define STATE_OF_BYTES(from, expression)                                                                          \
    do {                                                                                                          \
        const from *given = (const from *)raw;                                                                    \
        from low = (from)(expression(given[0])), high = low;                                                            \
        int32_t sum = 0, squares = 0, sizes = 0, zeros = 0;                                                       \
        for (size_t i = 0; i < n; i++) {                                                                          \
            const from v = (from)(expression(given[i]));                                                          \
            const int16_t wide = v, size = (int16_t)(wide < 0 ? -wide : wide);                                    \
            sum += wide;                                                                                          \
            sizes += size;                                                                                        \
            squares += (int32_t)wide * wide;                                                                      \
            zeros += v == 0;                                                                                      \
            low = v < low ? v : low;                                                                              \
            high = v > high ? v : high;                                                                           \
        }                                                                                                         \
        const double count = (double)n, mean = sum / count;                                                       \
        const int64_t apart = (int64_t)n * squares - (int64_t)sum * sum;                                          \
        const State s = {count, 0, 0, zeros, mean, sqrt((double)apart) / count, low, high, sizes, 0};             \
        *out = s;                                                                                                 \
    } while (0)
#define AS_BYTE(v) (v)
#define AS_TRUTH(v) ((v) != 0)

TARGET static void ISA(bytes)(int dtype, const char *raw, size_t n, State *out)
{
#ifdef LOOK_AT_BYTES
    const size_t whole = n & ~(size_t)31;
    if (dtype == UINT8 && whole) {
        ByteLook look;
        State rest;
        LOOK_AT_BYTES((const uint8_t *)raw, whole, &look);
        const double count = (double)whole;
        const int64_t apart = (int64_t)whole * look.squares - look.sum * look.sum;
        const State s = {count, 0, 0, (double)look.zeros, (double)look.sum / count, sqrt((double)apart) / count,
                         look.low, look.high, (double)look.sum, 0};
        *out = s;
        if (whole < n) {
            ISA(bytes)(dtype, raw + whole, n - whole, &rest);
            merge(out, &rest);
        }
        return;
    }
#endif
    if (dtype == INT8)
        STATE_OF_BYTES(int8_t, AS_BYTE);
    else if (dtype == UINT8)
        STATE_OF_BYTES(uint8_t, AS_BYTE);
    else
        STATE_OF_BYTES(uint8_t, AS_TRUTH);
}

/* The state of one block of at most `block_length(dtype)` elements. `before` is the state of values nearby, or NULL. */
TARGET static void ISA(block)(int dtype, const char *raw, size_t n, State *out, const State *before)
{
    union {
        float floats[BLOCK];
        double doubles[BLOCK / 4];
    } room;
    switch (dtype) {
    case FLOAT32:
        STATE_OF(float, 128, (const float *)raw, n);
        break;
    case FLOAT64:
        STATE_OF(double, 64, (const double *)raw, n);
        break;
    case BFLOAT16:
        STATE_OF(bfloat16, 128, (const uint16_t *)raw, n);
        break;
#ifdef LOOK_AT_FLOAT16
    case FLOAT16:
        STATE_OF(float16, 128, (const uint16_t *)raw, n);
        break;
#endif
    case INT8:
    case UINT8:
    case BOOL:
        ISA(bytes)(dtype, raw, n, out);
        break;
    case INT64: {
        int64_t from;
#ifdef LOOK_AT_INT64
        STATE_OF(int64, 64, (const int64_t *)raw, n);
        if (out->low > -(double)DOUBLE_COUNTS && out->high < (double)DOUBLE_COUNTS)
            break; /* none was rounded */
#else
        if (ISA(short_integers)((const int64_t *)raw, n, room.doubles)) {
            STATE_OF(double, 64, (const double *)room.doubles, n);
            break;
        }
#endif
        if (ISA(distances)((const int64_t *)raw, n, room.doubles, &from)) {
            before = NULL; /* of other distances */
            STATE_OF(double, 64, (const double *)room.doubles, n);
            ISA(move_by)(from, out);
            break;
        }
    }
        /* fall through */
    case INT32:
        ISA(doubles)(dtype, raw, n, room.doubles);
        STATE_OF(double, 64, (const double *)room.doubles, n);
        break;
    default:
        ISA(floats)(dtype, raw, n, room.floats);
        STATE_OF(float, 128, (const float *)room.floats, n);
        break;
    }
}

/* For each number, which count of an octave grid it belongs to (octaves.py); `mantissa` of its bits are below the
 * exponent. */
#define OCTAVE_PLACES(bits_type, signed_type, mantissa, bias)                                                     \
    do {                                                                                                          \
        const bits_type *bits = (const bits_type *)numbers;                                                       \
        const bits_type magnitude_mask = ~(bits_type)0 >> 1;                                                      \
        const bits_type infinite = (bits_type)(2 * (bias) + 1) << (mantissa);                                     \
        const int shift = (mantissa)-grid->bits;                                                                  \
        const signed_type first = ((signed_type)(grid->low + (bias)) << grid->bits) - 1;                          \
        for (size_t i = 0; i < n; i++) {                                                                          \
            const bits_type magnitude = bits[i] & magnitude_mask;                                                 \
            signed_type step = (signed_type)(magnitude >> shift) - first;                                         \
            step = step < 0 ? 0 : step;                                                                           \
            step = step > side + 1 ? side + 1 : step;                                                             \
            signed_type place = side + 1 + (bits[i] > magnitude_mask ? -step : step);                             \
            place = magnitude == infinite ? 2 * side + 4 : place;                                                 \
            place = magnitude > infinite ? 2 * side + 3 : place;                                                  \
            places[i] = (int32_t)place;                                                                           \
        }                                                                                                         \
    } while (0)

TARGET static void ISA(octave_places)(int wide, const void *numbers, size_t n, const Grid *grid, int32_t *places)
{
    const int32_t side = (int32_t)(grid->high - grid->low) << grid->bits;
    if (wide)
        OCTAVE_PLACES(uint64_t, int64_t, 52, 1023);
    else
        OCTAVE_PLACES(uint32_t, int32_t, 23, 127);
}

/* The same for equal bins between two ends: below, the bins, above, NaN, infinite. */
#define RANGE_PLACES(type)                                                                                        \
    do {                                                                                                          \
        const type *given = (const type *)numbers;                                                                \
        for (size_t i = 0; i < n; i++) {                                                                          \
            const double v = (double)given[i];                                                                    \
            double near = (v - low) * scale;                                                                      \
            near = near > 0 ? near : 0; /* NaN too */                                                             \
            near = near < bins - 1 ? near : bins - 1;                                                             \
            int32_t place = (int32_t)near;                                                                        \
            /* Rounding may be off by one beside an edge; the edges decide. */                                    \
            place -= v < edges[place] && place > 0;                                                               \
            place += v >= edges[place + 1] && place < bins - 1;                                                   \
            place = v < low ? 0 : v > high ? bins + 1 : place + 1;                                                \
            place = v - v == 0 ? place : v == v ? bins + 3 : bins + 2;                                            \
            places[i] = place;                                                                                    \
        }                                                                                                         \
    } while (0)

TARGET static void ISA(range_places)(int wide, const void *numbers, size_t n, const Grid *grid, int32_t *places)
{
    const int32_t bins = (int32_t)grid->bins;
    const double *edges = grid->edges, low = edges[0], high = edges[bins], scale = bins / (high - low);
    if (wide)
        RANGE_PLACES(double);
    else
        RANGE_PLACES(float);
}

/* How many of the elements belong to each place of a grid, added to `counts`. */
TARGET static void ISA(count)(int dtype, const char *raw, size_t n, const Grid *grid, int64_t *counts)
{
    union {
        float floats[BLOCK / 4];
        double doubles[BLOCK / 4];
    } room;
    int32_t places[BLOCK / 4];
    const int wide = dtype == FLOAT64 || dtype == INT32 || dtype == INT64;
    const int as_it_is = dtype == FLOAT32 || dtype == FLOAT64;
    while (n) {
        const size_t now = n < BLOCK / 4 ? n : BLOCK / 4;
        if (wide && !as_it_is)
            ISA(doubles)(dtype, raw, now, room.doubles);
        else if (!as_it_is)
            ISA(floats)(dtype, raw, now, room.floats);
        const void *numbers = as_it_is ? (const void *)raw : (const void *)&room;
        if (grid->edges)
            ISA(range_places)(wide, numbers, now, grid, places);
        else
            ISA(octave_places)(wide, numbers, now, grid, places);
        for (size_t i = 0; i < now; i++)
            counts[places[i]]++;
        raw += now * ITEM_BYTES[dtype];
        n -= now;
    }
}

#undef STATE_OF
#undef STATE_OF_BYTES
#undef AS_IT_IS
#undef AS_TRUTH
#undef EACH
#undef OCTAVE_PLACES
#undef RANGE_PLACES
