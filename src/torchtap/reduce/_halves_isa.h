/* float16 as float. Included once for each instruction set by whatever reads raw memory. */

TARGET static void ISA(halves)(const uint16_t *given, float *made, size_t n)
{
    size_t i = 0;
#ifdef HALF_BY_INSTRUCTION
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(made + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(given + i))));
#endif
    for (; i < n; i++)
        made[i] = widen_float16(given[i]);
}
