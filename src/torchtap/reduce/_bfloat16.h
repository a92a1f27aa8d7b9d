/* bfloat16 as float: the upper half of its bits. */

static inline float widen_bfloat16(uint16_t bits)
{
    const union {
        uint32_t bits;
        float number;
    } wide = {(uint32_t)bits << 16};
    return wide.number;
}
