/* The first look at a block, by AVX-512 instructions: what compilers make of _native_block.h's plain loops uses a part of
 * what the processor can do at once.
 *
 * Four vectors are added up as a tree in float, four such trees one after the other, two halves of a vector, then in
 * double: rounding of float enters seven times for 32 numbers. Where the center is zero, nothing is subtracted.
 *
 * The ends are found by the numbers' bits, which other units of the processor compare than those that add. Signed, each
 * positive number is above all negative ones; unsigned, below; and among those of one sign the larger bits are those of the
 * larger size. So the largest signed is the largest number and the largest unsigned the smallest, as long as there is
 * one of that sign; else the end that is missing is the number nearest to zero. (Of what is not finite nothing is kept.)
 */

AVX512 static inline __m512d add_in_double(__m512d so_far, __m512 x)
{
    const __m256 upper = _mm512_extractf32x8_ps(x, 1);
    return _mm512_add_pd(so_far, _mm512_cvtps_pd(_mm256_add_ps(_mm512_castps512_ps256(x), upper)));
}

#define AWAY(x) _mm512_sub_ps(x, middle)
#define AS_IT_LIES(x) (x)
#define SIZE(x) _mm512_and_ps(x, magnitude)
#define OF_FOUR(op, x0, x1, x2, x3) op(op(x0, x1), op(x2, x3))
#define SUM_FOUR(from, x) OF_FOUR(_mm512_add_ps, from(x##0), from(x##1), from(x##2), from(x##3))
#define LOOK_SUMS(from)                                                                                           \
    d = _mm512_add_ps(d, SUM_FOUR(from, x));                                                                      \
    q = _mm512_fmadd_ps(from(x0), from(x0), q);                                                                   \
    r = _mm512_fmadd_ps(from(x1), from(x1), r);                                                                   \
    q = _mm512_fmadd_ps(from(x2), from(x2), q);                                                                   \
    r = _mm512_fmadd_ps(from(x3), from(x3), r);                                                                   \
    a = _mm512_add_ps(a, SUM_FOUR(SIZE, x))

#define LOOK_AT_SOME(from, LOAD, ENDS, some)                                                                      \
    do {                                                                                                          \
        __m512 d = _mm512_setzero_ps(), q = d, r = d, a = d;                                                      \
        for (int k = 0; k < (some); k += 64) {                                                                    \
            LOAD(p + i + k);                                                                                      \
            LOOK_SUMS(from);                                                                                      \
            ENDS;                                                                                                 \
        }                                                                                                         \
        drift = add_in_double(drift, d);                                                                          \
        squares = add_in_double(squares, _mm512_add_ps(q, r));                                                    \
        l1 = add_in_double(l1, a);                                                                                \
    } while (0)
#define LOOK_THROUGH(from, LOAD, ENDS)                                                                            \
    do {                                                                                                          \
        size_t i = 0;                                                                                             \
        for (; i + 256 <= n; i += 256)                                                                            \
            LOOK_AT_SOME(from, LOAD, ENDS, 256);                                                                  \
        if (i < n)                                                                                                \
            LOOK_AT_SOME(from, LOAD, ENDS, 128);                                                                  \
    } while (0)

/* `n` is a multiple of 128. `bits` is the width of a number, `KEEP` puts what was found among the ends into `out`. */
#define DEFINE_LOOK(name, type, bits, LOAD, ENDS, KEEP)                                                           \
    AVX512 static void name(const type *p, size_t n, float center, Look *out)                                     \
    {                                                                                                             \
        const __m512 middle = _mm512_set1_ps(center);                                                             \
        const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));                              \
        const __m512i all_but_sign = _mm512_set1_epi##bits((type##_bits)(~(type##_bits)0 >> 1));                  \
        __m512d drift = _mm512_setzero_pd(), squares = drift, l1 = drift;                                         \
        __m512i largest = _mm512_setzero_si512(), largest_signed = _mm512_set1_epi32(-1), least = all_but_sign;   \
        if (center == 0)                                                                                          \
            LOOK_THROUGH(AS_IT_LIES, LOAD, ENDS);                                                                 \
        else                                                                                                      \
            LOOK_THROUGH(AWAY, LOAD, ENDS);                                                                       \
        out->drift = _mm512_reduce_add_pd(drift);                                                                 \
        out->squares = _mm512_reduce_add_pd(squares);                                                             \
        out->l1 = _mm512_reduce_add_pd(l1);                                                                       \
        KEEP;                                                                                                     \
    }

/* The largest and the smallest of 32 halves. One instruction finds the smallest of eight; turned round, the largest. */
AVX512 static inline uint16_t least_half(__m512i x)
{
    const __m256i y = _mm256_min_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    const __m128i z = _mm_min_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    return (uint16_t)_mm_cvtsi128_si32(_mm_minpos_epu16(z));
}

AVX512 static inline uint16_t largest_half(__m512i x)
{
    return (uint16_t)~least_half(_mm512_xor_si512(x, _mm512_set1_epi16(-1)));
}

AVX512 static inline uint16_t largest_signed_half(__m512i x)
{
    const __m512i sign = _mm512_set1_epi16(-0x8000);
    return largest_half(_mm512_xor_si512(x, sign)) ^ 0x8000;
}

static inline float float_of_bits(uint32_t bits)
{
    const union {
        uint32_t bits;
        float number;
    } same = {bits};
    return same.number;
}

/* The ends of a block from what each lane found. */
#define KEEP_ENDS(bits, sign, below, above, near, widen)                                                          \
    do {                                                                                                          \
        const bits smallest = (bits)(below), greatest = (bits)(above), nearest = (bits)(near);                    \
        out->low = widen(smallest & (sign) ? smallest : nearest);                                                 \
        out->high = widen(greatest & (sign) ? (bits)(nearest | (sign)) : greatest);                               \
        out->least = widen(nearest);                                                                              \
    } while (0)
#define KEEP_FLOAT                                                                                                \
    KEEP_ENDS(uint32_t, 0x80000000u, _mm512_reduce_max_epu32(largest), _mm512_reduce_max_epi32(largest_signed),   \
              _mm512_reduce_min_epu32(least), float_of_bits)
#define KEEP_HALVES(widen)                                                                                        \
    KEEP_ENDS(uint16_t, 0x8000u, largest_half(largest), largest_signed_half(largest_signed), least_half(least), widen)
#define KEEP_FLOAT16 KEEP_HALVES(widen_float16)
#define KEEP_BFLOAT16 KEEP_HALVES(widen_bfloat16)

#define LOAD_FLOATS(p)                                                                                            \
    const __m512 x0 = _mm512_loadu_ps(p), x1 = _mm512_loadu_ps((p) + 16), x2 = _mm512_loadu_ps((p) + 32),         \
                 x3 = _mm512_loadu_ps((p) + 48)
#define BITS(x) _mm512_castps_si512(x)
#define FLOAT_ENDS                                                                                                \
    largest = _mm512_max_epu32(largest, OF_FOUR(_mm512_max_epu32, BITS(x0), BITS(x1), BITS(x2), BITS(x3)));       \
    largest_signed =                                                                                              \
        _mm512_max_epi32(largest_signed, OF_FOUR(_mm512_max_epi32, BITS(x0), BITS(x1), BITS(x2), BITS(x3)));      \
    least = _mm512_min_epu32(least, OF_FOUR(_mm512_min_epu32, BITS(SIZE(x0)), BITS(SIZE(x1)), BITS(SIZE(x2)),     \
                                            BITS(SIZE(x3))))

/* Halves need not be widened for that, and twice as many fit into a vector. */
#define ENDS_AMONG_HALVES(h)                                                                                      \
    largest = _mm512_max_epu16(largest, h);                                                                       \
    largest_signed = _mm512_max_epi16(largest_signed, h);                                                         \
    least = _mm512_min_epu16(least, _mm512_and_si512(h, all_but_sign))
#define HALVES_ENDS                                                                                               \
    ENDS_AMONG_HALVES(h0);                                                                                        \
    ENDS_AMONG_HALVES(h1)
#define WIDENED(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define LOAD_FLOAT16(p)                                                                                           \
    const __m512i h0 = _mm512_loadu_si512(p), h1 = _mm512_loadu_si512((p) + 32);                                  \
    const __m512 x0 = WIDENED(p), x1 = WIDENED((p) + 16), x2 = WIDENED((p) + 32), x3 = WIDENED((p) + 48)
/* Of each pair one is the upper half as it lies, the other one shift away. */
#define SHIFTED(h) _mm512_castsi512_ps(_mm512_slli_epi32(h, 16))
#define UPPER(h) _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32((int)0xffff0000u)))
#define LOAD_BFLOAT16(p)                                                                                          \
    const __m512i h0 = _mm512_loadu_si512(p), h1 = _mm512_loadu_si512((p) + 32);                                  \
    const __m512 x0 = SHIFTED(h0), x1 = UPPER(h0), x2 = SHIFTED(h1), x3 = UPPER(h1)

#define float_bits uint32_t
#define uint16_t_bits uint16_t
DEFINE_LOOK(look_float_avx512, float, 32, LOAD_FLOATS, FLOAT_ENDS, KEEP_FLOAT)
DEFINE_LOOK(look_float16_avx512, uint16_t, 16, LOAD_FLOAT16, HALVES_ENDS, KEEP_FLOAT16)
DEFINE_LOOK(look_bfloat16_avx512, uint16_t, 16, LOAD_BFLOAT16, HALVES_ENDS, KEEP_BFLOAT16)

/* 64-bit integers, as doubles. Whoever asks looks at the ends: where both are numbers that double counts one by one, nothing
 * was rounded. `n` is a multiple of 64. */
AVX512 static void look_int64_avx512(const int64_t *p, size_t n, double center, WideLook *out)
{
    const __m512d middle = _mm512_set1_pd(center);
    __m512d drift = _mm512_setzero_pd(), squares = drift, more = drift, l1 = drift;
    __m512i low = _mm512_set1_epi64(INT64_MAX), high = _mm512_set1_epi64(INT64_MIN), least = _mm512_set1_epi64(-1);
    for (size_t i = 0; i < n; i += 16) {
        const __m512i v = _mm512_loadu_si512(p + i), w = _mm512_loadu_si512(p + i + 8);
        const __m512d x = _mm512_cvtepi64_pd(v), y = _mm512_cvtepi64_pd(w);
        const __m512d a = _mm512_sub_pd(x, middle), b = _mm512_sub_pd(y, middle);
        drift = _mm512_add_pd(drift, _mm512_add_pd(a, b));
        squares = _mm512_fmadd_pd(a, a, squares);
        more = _mm512_fmadd_pd(b, b, more);
        l1 = _mm512_add_pd(l1, _mm512_add_pd(_mm512_abs_pd(x), _mm512_abs_pd(y)));
        low = _mm512_min_epi64(low, _mm512_min_epi64(v, w));
        high = _mm512_max_epi64(high, _mm512_max_epi64(v, w));
        least = _mm512_min_epu64(least, _mm512_min_epu64(_mm512_abs_epi64(v), _mm512_abs_epi64(w)));
    }
    out->drift = _mm512_reduce_add_pd(drift);
    out->squares = _mm512_reduce_add_pd(_mm512_add_pd(squares, more));
    out->l1 = _mm512_reduce_add_pd(l1);
    out->low = (double)_mm512_reduce_min_epi64(low);
    out->high = (double)_mm512_reduce_max_epi64(high);
    out->least = (double)_mm512_reduce_min_epu64(least);
}

/* Sums of unsigned bytes, at most 4096 of them, a multiple of 32. */
AVX512 static void look_bytes_avx512(const uint8_t *p, size_t n, ByteLook *out)
{
    const __m512i none = _mm512_setzero_si512();
    __m512i sum = none, squares = none, low = _mm512_set1_epi8(-1), high = none;
    out->zeros = 0;
    for (size_t i = 0; i < n; i += 64) {
        const __mmask64 there = n - i < 64 ? 0xffffffffu : ~(__mmask64)0;
        const __m512i x = _mm512_maskz_loadu_epi8(there, p + i);
        const __m512i front = _mm512_unpacklo_epi8(x, none), back = _mm512_unpackhi_epi8(x, none);
        sum = _mm512_add_epi64(sum, _mm512_sad_epu8(x, none));
        squares = _mm512_add_epi32(squares, _mm512_add_epi32(_mm512_madd_epi16(front, front), _mm512_madd_epi16(back, back)));
        out->zeros += __builtin_popcountll(_mm512_mask_testn_epi8_mask(there, x, x));
        low = _mm512_mask_min_epu8(low, there, low, x);
        high = _mm512_max_epu8(high, x);
    }
    uint8_t lows[16], highs[16];
    const __m256i low_half = _mm256_min_epu8(_mm512_castsi512_si256(low), _mm512_extracti64x4_epi64(low, 1));
    const __m256i high_half = _mm256_max_epu8(_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64(high, 1));
    _mm_storeu_si128((__m128i *)lows, _mm_min_epu8(_mm256_castsi256_si128(low_half), _mm256_extracti128_si256(low_half, 1)));
    _mm_storeu_si128((__m128i *)highs,
                     _mm_max_epu8(_mm256_castsi256_si128(high_half), _mm256_extracti128_si256(high_half, 1)));
    for (int lane = 1; lane < 16; lane++) {
        lows[0] = lows[lane] < lows[0] ? lows[lane] : lows[0];
        highs[0] = highs[lane] > highs[0] ? highs[lane] : highs[0];
    }
    out->sum = _mm512_reduce_add_epi64(sum);
    /* Eight squares a step in each lane, 64 steps: no lane overflows. */
    out->squares = _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_srli_epi64(squares, 32),
                                                            _mm512_and_si512(squares, _mm512_set1_epi64(0xffffffff))));
    out->low = lows[0];
    out->high = highs[0];
}

#undef AWAY
#undef AS_IT_LIES
#undef SIZE
#undef OF_FOUR
#undef SUM_FOUR
#undef LOOK_SUMS
#undef LOOK_AT_SOME
#undef LOOK_THROUGH
#undef DEFINE_LOOK
#undef KEEP_ENDS
#undef KEEP_FLOAT
#undef KEEP_HALVES
#undef KEEP_FLOAT16
#undef KEEP_BFLOAT16
#undef LOAD_FLOATS
#undef BITS
#undef FLOAT_ENDS
#undef ENDS_AMONG_HALVES
#undef HALVES_ENDS
#undef WIDENED
#undef LOAD_FLOAT16
#undef SHIFTED
#undef UPPER
#undef LOAD_BFLOAT16
#undef float_bits
#undef uint16_t_bits
