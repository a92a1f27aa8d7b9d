/* From raw memory of any dtype to the state of a span of it. Included by _native.c once for each instruction set. */

#define T float
#define LANES 16
#define LARGEST FLT_MAX
#define LANE_INTEGER int32_t
/* Squares below 1e-38 lose digits or vanish; a whole block of them makes less than 1e-34. */
#define TINY 1e-27
#define FABS fabsf

#define S float
#define WIDEN(s) (s)
#define NAME(x) ISA(x##_float)
#include "_native_block.h"

#define S uint16_t
#define WIDEN(s) widen_bfloat16(s)
#define NAME(x) ISA(x##_bfloat16)
#include "_native_block.h"

#undef T
#undef LANES
#undef LARGEST
#undef LANE_INTEGER
#undef TINY
#undef FABS

#define T double
#define LANES 8
#define LARGEST DBL_MAX
#define LANE_INTEGER int64_t
#define TINY 0.0
#define FABS fabs

#define S double
#define WIDEN(s) (s)
#define NAME(x) ISA(x##_double)
#include "_native_block.h"

#undef T
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

#define CONVERTED(from, to, suffix, group, expression)                                                            \
    do {                                                                                                          \
        const from *given = (const from *)raw;                                                                    \
        to *made = (to *)room;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                          \
            const from v = given[i];                                                                              \
            made[i] = (expression);                                                                               \
        }                                                                                                         \
        STATE_OF(suffix, group, (const to *)made, n);                                               \
    } while (0)

TARGET static void ISA(halves)(const uint16_t *given, float *made, size_t n)
{
    size_t i = 0;
#ifdef HALF_BY_INSTRUCTION
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(made + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(given + i))));
#endif
    for (; i < n; i++) {
        /* The exponent is 112 too small as it stands; a multiplication puts that right for subnormals too. */
        const uint32_t h = given[i];
        const uint32_t strange = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
        union {
            uint32_t bits;
            float number;
        } u = {(h & 0x7fff) << 13};
        u.number *= 0x1p112f;
        u.bits |= strange | (h & 0x8000) << 16;
        made[i] = u.number;
    }
}

/* The state of one block of at most `block_length(dtype)` elements. `before` is the state of values nearby, or NULL. */
TARGET static void ISA(block)(int dtype, const char *raw, size_t n, State *out, const State *before)
{
    double room[BLOCK / 4];
    switch (dtype) {
    case FLOAT32:
        STATE_OF(float, 128, (const float *)raw, n);
        break;
    case FLOAT64:
        STATE_OF(double, 64, (const double *)raw, n);
        break;
    case FLOAT16:
        ISA(halves)((const uint16_t *)raw, (float *)room, n);
        STATE_OF(float, 128, (const float *)room, n);
        break;
    case BFLOAT16:
        STATE_OF(bfloat16, 128, (const uint16_t *)raw, n);
        break;
    case INT8:
        CONVERTED(int8_t, float, float, 128, (float)v);
        break;
    case UINT8:
        CONVERTED(uint8_t, float, float, 128, (float)v);
        break;
    case INT16:
        CONVERTED(int16_t, float, float, 128, (float)v);
        break;
    case INT32:
        CONVERTED(int32_t, double, double, 64, (double)v);
        break;
    case INT64:
        CONVERTED(int64_t, double, double, 64, (double)v);
        break;
    case BOOL:
        CONVERTED(uint8_t, float, float, 128, v ? 1.0f : 0.0f);
        break;
    }
}

#undef STATE_OF
#undef CONVERTED
