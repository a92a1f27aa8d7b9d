/* float16 as float. Included once for each instruction set by whatever reads raw memory. */

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
