/* 16-bit numbers as float. */

/* bfloat16 is the upper half of a float's bits. */

static inline float widen_bfloat16(uint16_t bits)
{
    const union {
        uint32_t bits;
        float number;
    } wide = {(uint32_t)bits << 16};
    return wide.number;
}

/* The exponent of float16 is 112 too small as it stands, or, of what is not finite, 224. No number on the way is below
 * the normal range. */
static inline float widen_float16(uint16_t given)
{
    const uint32_t h = given, magnitude = h & 0x7fff;
    union {
        uint32_t bits;
        float number;
    } normal, small, whole;
    normal.bits = (magnitude << 13) + ((h & 0x7c00) == 0x7c00 ? 0x70000000u : 0x38000000u);
    small.number = (float)(int32_t)magnitude * 0x1p-24f;
    whole.bits = (magnitude < 0x400 ? small.bits : normal.bits) | (h & 0x8000) << 16;
    return whole.number;
}
