/* float16 as float. Included once for each instruction set by whatever reads raw memory. */

TARGET static void ISA(halves)(const uint16_t *given, float *made, size_t n)
{
    size_t i = 0;
#ifdef HALF_BY_INSTRUCTION
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(made + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(given + i))));
#endif
    for (; i < n; i++) {
        const uint32_t h = given[i], magnitude = h & 0x7fff;
        union {
            uint32_t bits;
            float number;
        } normal, small;
        /* The exponent is 112 too small as it stands, or, of what is not finite, 224. */
        normal.bits = (magnitude << 13) + ((h & 0x7c00) == 0x7c00 ? 0x70000000u : 0x38000000u);
        small.number = (float)(int32_t)magnitude * 0x1p-24f;
        union {
            uint32_t bits;
            float number;
        } u = {(magnitude < 0x400 ? small.bits : normal.bits) | (h & 0x8000) << 16};
        made[i] = u.number;
    }
}
