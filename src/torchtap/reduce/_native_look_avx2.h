/* The first look at a block, by AVX2 instructions: what compilers make of _native_block.h's plain loops runs out of
 * registers.
 *
 * Eight numbers are added up in float, then in double: rounding of float enters eight times and not once for each. */

AVX2 static inline __m256d in_double(__m256 x)
{
    return _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
}

AVX2 static inline double sum_of_four(__m256d x)
{
    double lanes[4];
    _mm256_storeu_pd(lanes, x);
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

#define AS_IT_IS(away) (away)
#define STRETCHED(away) _mm256_mul_ps(away, stretch)
#define LOOK_ONE(x, d, q, a, of)                                                                                  \
    do {                                                                                                          \
        const __m256 away = _mm256_sub_ps(x, middle), size = _mm256_and_ps(x, magnitude);                         \
        d = _mm256_add_ps(d, away);                                                                               \
        q = _mm256_fmadd_ps(of(away), of(away), q);                                                               \
        a = _mm256_add_ps(a, size);                                                                               \
        low = _mm256_min_ps(x, low);                                                                              \
        high = _mm256_max_ps(x, high);                                                                            \
        least = _mm256_min_ps(size, least);                                                                       \
    } while (0)

#define LOOK_THROUGH(LOAD, of)                                                                                    \
    for (size_t i = 0; i < n; i += 128) {                                                                         \
        __m256 d = _mm256_setzero_ps(), q = d, a = d, e = d, r = d, b = d;                                        \
        for (int k = 0; k < 8; k++) {                                                                             \
            __m256 x, y;                                                                                          \
            LOAD(p + i + 16 * k, x, y);                                                                           \
            LOOK_ONE(x, d, q, a, of);                                                                             \
            LOOK_ONE(y, e, r, b, of);                                                                             \
        }                                                                                                         \
        drift = _mm256_add_pd(drift, _mm256_add_pd(in_double(d), in_double(e)));                                  \
        squares = _mm256_add_pd(squares, _mm256_add_pd(in_double(q), in_double(r)));                              \
        l1 = _mm256_add_pd(l1, _mm256_add_pd(in_double(a), in_double(b)));                                        \
    }

/* `n` is a multiple of 128. */
#define DEFINE_LOOK(name, type, LOAD)                                                                             \
    AVX2 static void name(const type *p, size_t n, float center, float scale, int counting, Look *out)            \
    {                                                                                                             \
        (void)counting;                                                                                           \
        const __m256 middle = _mm256_set1_ps(center), stretch = _mm256_set1_ps(scale);                            \
        const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));                              \
        __m256d drift = _mm256_setzero_pd(), squares = drift, l1 = drift;                                         \
        __m256 low = _mm256_set1_ps(INFINITY), high = _mm256_set1_ps(-INFINITY), least = low;                     \
        if (scale == 1)                                                                                           \
            LOOK_THROUGH(LOAD, AS_IT_IS)                                                                          \
        else                                                                                                      \
            LOOK_THROUGH(LOAD, STRETCHED)                                                                         \
        float lows[8], highs[8], leasts[8];                                                                       \
        _mm256_storeu_ps(lows, low);                                                                              \
        _mm256_storeu_ps(highs, high);                                                                            \
        _mm256_storeu_ps(leasts, least);                                                                          \
        out->drift = sum_of_four(drift);                                                                          \
        out->squares = sum_of_four(squares);                                                                      \
        out->l1 = sum_of_four(l1);                                                                                \
        for (int lane = 1; lane < 8; lane++) {                                                                    \
            lows[0] = lows[lane] < lows[0] ? lows[lane] : lows[0];                                                \
            highs[0] = highs[lane] > highs[0] ? highs[lane] : highs[0];                                           \
            leasts[0] = leasts[lane] < leasts[0] ? leasts[lane] : leasts[0];                                      \
        }                                                                                                         \
        out->low = lows[0];                                                                                       \
        out->high = highs[0];                                                                                     \
        out->least = leasts[0];                                                                                   \
        out->zeros = -1;                                                                                          \
    }

#define LOAD_FLOAT(p, x, y)                                                                                       \
    x = _mm256_loadu_ps(p);                                                                                       \
    y = _mm256_loadu_ps((p) + 8)
/* Of each pair one is the upper half as it lies, the other one shift away. */
#define LOAD_BFLOAT16(p, x, y)                                                                                    \
    const __m256i pairs = _mm256_loadu_si256((const __m256i *)(p));                                               \
    x = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));                                                        \
    y = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)))

#define LOAD_FLOAT16(p, x, y)                                                                                     \
    x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)));                                                   \
    y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((p) + 8)))

DEFINE_LOOK(look_float_avx2, float, LOAD_FLOAT)
DEFINE_LOOK(look_bfloat16_avx2, uint16_t, LOAD_BFLOAT16)
DEFINE_LOOK(look_float16_avx2, uint16_t, LOAD_FLOAT16)
#undef AS_IT_IS
#undef STRETCHED
#undef LOOK_ONE
#undef LOOK_THROUGH
#undef DEFINE_LOOK
#undef LOAD_FLOAT
#undef LOAD_BFLOAT16
#undef LOAD_FLOAT16

/* Sums of unsigned bytes, at most 4096 of them, a multiple of 32. */
typedef struct {
    int64_t sum, squares, zeros;
    uint8_t low, high;
} ByteLook;

AVX2 static int64_t sum_of_wide(__m256i x)
{
    int64_t lanes[4];
    _mm256_storeu_si256((__m256i *)lanes, x);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

AVX2 static void look_bytes_avx2(const uint8_t *p, size_t n, ByteLook *out)
{
    const __m256i none = _mm256_setzero_si256();
    __m256i sum = none, squares = none, zeros = none, low = _mm256_set1_epi8(-1), high = none;
    for (size_t i = 0; i < n; i += 32) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)(p + i));
        const __m256i front = _mm256_unpacklo_epi8(x, none), back = _mm256_unpackhi_epi8(x, none);
        sum = _mm256_add_epi64(sum, _mm256_sad_epu8(x, none));
        squares = _mm256_add_epi32(squares, _mm256_madd_epi16(front, front));
        squares = _mm256_add_epi32(squares, _mm256_madd_epi16(back, back));
        zeros = _mm256_add_epi64(zeros, _mm256_sad_epu8(_mm256_sub_epi8(none, _mm256_cmpeq_epi8(x, none)), none));
        low = _mm256_min_epu8(low, x);
        high = _mm256_max_epu8(high, x);
    }
    uint8_t lows[32], highs[32];
    _mm256_storeu_si256((__m256i *)lows, low);
    _mm256_storeu_si256((__m256i *)highs, high);
    for (int lane = 1; lane < 32; lane++) {
        lows[0] = lows[lane] < lows[0] ? lows[lane] : lows[0];
        highs[0] = highs[lane] > highs[0] ? highs[lane] : highs[0];
    }
    /* Four squares a step in each lane, 128 steps: no lane overflows. */
    const __m256i wide = _mm256_add_epi64(_mm256_srli_epi64(squares, 32),
                                          _mm256_and_si256(squares, _mm256_set1_epi64x(0xffffffff)));
    out->sum = sum_of_wide(sum);
    out->squares = sum_of_wide(wide);
    out->zeros = sum_of_wide(zeros);
    out->low = lows[0];
    out->high = highs[0];
}
