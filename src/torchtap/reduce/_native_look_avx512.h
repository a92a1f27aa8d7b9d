/* The first look at a block, by AVX-512 instructions: what compilers make of _native_block.h's plain loops uses a part of
 * what the processor can do at once.
 *
 * Every instruction counts here, and so does the unit that carries it out. Of two numbers x and y the larger size of x + y and
 * x - y is |x| + |y|, rounded alike, so a pair's sizes take two instructions beside the sum that is needed anyway. Half of the
 * sums are made by the units that multiply, with a factor of one: those that only add are the busier ones.
 *
 * Two numbers are added up in float, sixteen such pairs, two or four of these, then in double: rounding of float enters less
 * than twenty times for 32 numbers, which is below 1e-6 even if it always goes the same way.
 *
 * The ends are found by the numbers' bits, which other units of the processor compare than those that add. Signed, each
 * positive number is above all negative ones; unsigned, below; and among those of one sign the larger bits are those of the
 * larger size. So the largest signed is the largest number and the largest unsigned the smallest, as long as there is
 * one of that sign; else the end that is missing is the number nearest to zero. (Of what is not finite nothing is kept.)
 */

#define INLINE AVX512 static inline __attribute__((always_inline))

typedef struct {
    __m512d drift, squares, l1;
} Totals;

typedef struct {
    __m512i largest, largest_signed, least, zeros;
} Ends;

#define SMALLER_SIZE 0xa /* of two numbers, without its sign */
#define LARGER_SIZE 0xb

/* What is known of a look before it begins, so that it does no more than it must: whether the center is zero, and nothing is
 * subtracted; whether distances are multiplied before they are squared; whether there are zeros to be counted. */
#define AWAY 1
#define STRETCHED 2
#define COUNTING 4

/* What a lane of one width has added up in float. */
#define DEFINE_SUMS(Sums, Floats, V, add_pair)                                                                    \
    typedef struct {                                                                                              \
        Floats drift, l1, squares, more;                                                                          \
    } Sums;                                                                                                       \
                                                                                                                  \
    INLINE void add_pair(Sums *to, Floats x, Floats y, Floats center, Floats scale, int how)                      \
    {                                                                                                             \
        const Floats one = V(set1_ps)(1);                                                                         \
        const Floats sum = V(add_ps)(x, y), apart = V(fnmadd_ps)(y, one, x);                                      \
        to->l1 = V(fmadd_ps)(V(range_ps)(sum, apart, LARGER_SIZE), one, to->l1);                                  \
        if (how & AWAY) {                                                                                         \
            x = V(sub_ps)(x, center);                                                                             \
            y = V(sub_ps)(y, center);                                                                             \
        }                                                                                                         \
        to->drift = V(fmadd_ps)(how & AWAY ? V(add_ps)(x, y) : sum, one, to->drift);                              \
        if (how & STRETCHED) {                                                                                    \
            x = V(mul_ps)(x, scale);                                                                              \
            y = V(mul_ps)(y, scale);                                                                              \
        }                                                                                                         \
        to->squares = V(fmadd_ps)(x, x, to->squares);                                                             \
        to->more = V(fmadd_ps)(y, y, to->more);                                                                   \
    }
#define WIDE(op) _mm512_##op
#define NARROW(op) _mm256_##op
DEFINE_SUMS(WideSums, __m512, WIDE, add_wide_pair)
DEFINE_SUMS(NarrowSums, __m256, NARROW, add_narrow_pair)

INLINE __m512d add_wide(__m512d so_far, __m512 x, __m512 y)
{
    const __m512 sum = _mm512_add_ps(x, y);
    const __m256 upper = _mm512_extractf32x8_ps(sum, 1);
    return _mm512_add_pd(so_far, _mm512_cvtps_pd(_mm256_add_ps(_mm512_castps512_ps256(sum), upper)));
}

INLINE void add_wide_in_double(Totals *to, const WideSums *sums)
{
    to->drift = add_wide(to->drift, sums[0].drift, sums[1].drift);
    to->l1 = add_wide(to->l1, sums[0].l1, sums[1].l1);
    to->squares = add_wide(to->squares, _mm512_add_ps(sums[0].squares, sums[1].squares),
                           _mm512_add_ps(sums[0].more, sums[1].more));
}

INLINE __m512d add_narrow(__m512d so_far, __m256 x, __m256 y, __m256 z, __m256 w)
{
    return _mm512_add_pd(so_far, _mm512_cvtps_pd(_mm256_add_ps(_mm256_add_ps(x, y), _mm256_add_ps(z, w))));
}

INLINE void add_narrow_in_double(Totals *to, const NarrowSums *s)
{
    to->drift = add_narrow(to->drift, s[0].drift, s[1].drift, s[2].drift, s[3].drift);
    to->l1 = add_narrow(to->l1, s[0].l1, s[1].l1, s[2].l1, s[3].l1);
    to->squares = add_narrow(to->squares, _mm256_add_ps(s[0].squares, s[0].more), _mm256_add_ps(s[1].squares, s[1].more),
                             _mm256_add_ps(s[2].squares, s[2].more), _mm256_add_ps(s[3].squares, s[3].more));
}

#define OF_FOUR(op, x0, x1, x2, x3) op(op(x0, x1), op(x2, x3))
#define BITS(x) _mm512_castps_si512(x)
#define NEARER(x, y) _mm512_range_ps(x, y, SMALLER_SIZE)

/* Zeros of either sign are counted where there are any to be expected: each lane counts its own. Zero is then the number
 * nearest to zero, and none is looked for. */
INLINE void count_zeros(__m512i x, Ends *ends)
{
    const __mmask16 there = _mm512_testn_epi32_mask(x, _mm512_set1_epi32(0x7fffffff));
    ends->zeros = _mm512_mask_sub_epi32(ends->zeros, there, ends->zeros, _mm512_set1_epi32(-1));
}

/* Each of these looks at 64 numbers. */
INLINE void look_at_floats(const float *p, __m512 center, __m512 scale, int how, WideSums *sums, Ends *ends)
{
    const __m512 x0 = _mm512_loadu_ps(p), x1 = _mm512_loadu_ps(p + 16), x2 = _mm512_loadu_ps(p + 32),
                 x3 = _mm512_loadu_ps(p + 48);
    add_wide_pair(sums, x0, x1, center, scale, how);
    add_wide_pair(sums + 1, x2, x3, center, scale, how);
    ends->largest =
        _mm512_max_epu32(ends->largest, OF_FOUR(_mm512_max_epu32, BITS(x0), BITS(x1), BITS(x2), BITS(x3)));
    ends->largest_signed =
        _mm512_max_epi32(ends->largest_signed, OF_FOUR(_mm512_max_epi32, BITS(x0), BITS(x1), BITS(x2), BITS(x3)));
    if (how & COUNTING) {
        count_zeros(BITS(x0), ends);
        count_zeros(BITS(x1), ends);
        count_zeros(BITS(x2), ends);
        count_zeros(BITS(x3), ends);
    } else {
        ends->least = BITS(NEARER(_mm512_castsi512_ps(ends->least), OF_FOUR(NEARER, x0, x1, x2, x3)));
    }
}

/* Halves need not be widened for their ends, and twice as many fit into a vector. */
INLINE void find_ends_of_halves(__m512i h, int how, Ends *ends)
{
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    ends->largest = _mm512_max_epu16(ends->largest, h);
    ends->largest_signed = _mm512_max_epi16(ends->largest_signed, h);
    if (how & COUNTING) { /* 256 in a lane of a block at most */
        const __mmask32 there = _mm512_testn_epi16_mask(h, magnitude);
        ends->zeros = _mm512_mask_sub_epi16(ends->zeros, there, ends->zeros, _mm512_set1_epi16(-1));
    } else {
        ends->least = _mm512_min_epu16(ends->least, _mm512_and_si512(h, magnitude));
    }
}

/* Of each pair one is the upper half as it lies, the other one shift away. */
INLINE void look_at_bfloat16s(const uint16_t *p, __m512 center, __m512 scale, int how, WideSums *sums, Ends *ends)
{
    for (int i = 0; i < 2; i++) {
        const __m512i h = _mm512_loadu_si512(p + 32 * i);
        const __m512i upper = _mm512_and_si512(h, _mm512_set1_epi32((int)0xffff0000u));
        add_wide_pair(sums + i, _mm512_castsi512_ps(_mm512_slli_epi32(h, 16)), _mm512_castsi512_ps(upper), center, scale, how);
        find_ends_of_halves(h, how, ends);
    }
}

/* In half a vector, since widening to a whole one takes a shuffle as well. */
INLINE void look_at_float16s(const uint16_t *p, __m256 center, __m256 scale, int how, NarrowSums *sums, Ends *ends)
{
    for (int i = 0; i < 4; i++) {
        const __m128i *given = (const __m128i *)(p + 16 * i);
        add_narrow_pair(sums + i, _mm256_cvtph_ps(_mm_loadu_si128(given)), _mm256_cvtph_ps(_mm_loadu_si128(given + 1)),
                        center, scale, how);
    }
    find_ends_of_halves(_mm512_loadu_si512(p), how, ends);
    find_ends_of_halves(_mm512_loadu_si512(p + 32), how, ends);
}

#define IN_FLOAT 1024 /* so many numbers are added up in float: 16 pairs in each sum of each lane */

#define LOOK_THROUGH(how, Sums, sets, LOOK_AT_64, IN_DOUBLE)                                                      \
    for (size_t i = 0; i < n;) {                                                                                  \
        const size_t end = n - i < IN_FLOAT ? n : i + IN_FLOAT;                                                   \
        Sums sums[sets] = {0};                                                                                    \
        for (; i < end; i += 64)                                                                                  \
            LOOK_AT_64(p + i, middle, stretch, how, sums, &ends);                                                 \
        IN_DOUBLE(&totals, sums);                                                                                 \
    }

/* `n` is a multiple of 64. `farthest` is above every size, `KEEP` puts what was found among the ends into `out`. */
#define DEFINE_LOOK(name, type, Floats, V, Sums, sets, LOOK_AT_64, IN_DOUBLE, farthest, ZEROS, KEEP)              \
    AVX512 static void name(const type *p, size_t n, float center, float scale, int counting, Look *out)          \
    {                                                                                                             \
        const Floats middle = V(set1_ps)(center), stretch = V(set1_ps)(scale);                                    \
        Totals totals = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};                          \
        Ends ends = {_mm512_setzero_si512(), _mm512_set1_epi32(-1), _mm512_set1_epi32(farthest),                  \
                     _mm512_setzero_si512()};                                                                     \
        if (scale != 1 && counting)                                                                               \
            LOOK_THROUGH(AWAY | STRETCHED | COUNTING, Sums, sets, LOOK_AT_64, IN_DOUBLE)                          \
        else if (scale != 1)                                                                                      \
            LOOK_THROUGH(AWAY | STRETCHED, Sums, sets, LOOK_AT_64, IN_DOUBLE)                                     \
        else if (center == 0 && counting)                                                                         \
            LOOK_THROUGH(COUNTING, Sums, sets, LOOK_AT_64, IN_DOUBLE)                                             \
        else if (center == 0)                                                                                     \
            LOOK_THROUGH(0, Sums, sets, LOOK_AT_64, IN_DOUBLE)                                                    \
        else if (counting)                                                                                        \
            LOOK_THROUGH(AWAY | COUNTING, Sums, sets, LOOK_AT_64, IN_DOUBLE)                                      \
        else                                                                                                      \
            LOOK_THROUGH(AWAY, Sums, sets, LOOK_AT_64, IN_DOUBLE)                                                 \
        out->zeros = counting ? ZEROS : -1;                                                                       \
        if (out->zeros == 0) { /* so the number nearest to zero is not known */                                   \
            name(p, n, center, scale, 0, out);                                                                    \
            return;                                                                                               \
        }                                                                                                         \
        if (counting)                                                                                             \
            ends.least = _mm512_setzero_si512();                                                                  \
        out->drift = _mm512_reduce_add_pd(totals.drift);                                                          \
        out->squares = _mm512_reduce_add_pd(totals.squares);                                                      \
        out->l1 = _mm512_reduce_add_pd(totals.l1);                                                                \
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
    KEEP_ENDS(uint32_t, 0x80000000u, _mm512_reduce_max_epu32(ends.largest),                                       \
              _mm512_reduce_max_epi32(ends.largest_signed), _mm512_reduce_min_epu32(ends.least), float_of_bits)
#define KEEP_HALVES(widen)                                                                                        \
    KEEP_ENDS(uint16_t, 0x8000u, largest_half(ends.largest), largest_signed_half(ends.largest_signed),            \
              least_half(ends.least), widen)
#define KEEP_FLOAT16 KEEP_HALVES(widen_float16)
#define KEEP_BFLOAT16 KEEP_HALVES(widen_bfloat16)

#define ZERO_FLOATS _mm512_reduce_add_epi32(ends.zeros)
#define ZERO_HALVES _mm512_reduce_add_epi32(_mm512_madd_epi16(ends.zeros, _mm512_set1_epi16(1)))

DEFINE_LOOK(look_float_avx512, float, __m512, WIDE, WideSums, 2, look_at_floats, add_wide_in_double, 0x7f800000, ZERO_FLOATS,
            KEEP_FLOAT)
DEFINE_LOOK(look_bfloat16_avx512, uint16_t, __m512, WIDE, WideSums, 2, look_at_bfloat16s, add_wide_in_double, 0x7fff7fff,
            ZERO_HALVES, KEEP_BFLOAT16)
DEFINE_LOOK(look_float16_avx512, uint16_t, __m256, NARROW, NarrowSums, 4, look_at_float16s, add_narrow_in_double, 0x7fff7fff,
            ZERO_HALVES, KEEP_FLOAT16)

/* 64-bit integers, as doubles. Whoever asks looks at the ends: where both are numbers that double counts one by one, nothing
 * was rounded. `n` is a multiple of 64. */
AVX512 static void look_int64_avx512(const int64_t *p, size_t n, double center, double scale, int counting, WideLook *out)
{
    (void)scale, (void)counting;
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
    out->zeros = -1;
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

#undef INLINE
#undef SMALLER_SIZE
#undef LARGER_SIZE
#undef AWAY
#undef STRETCHED
#undef COUNTING
#undef DEFINE_SUMS
#undef WIDE
#undef NARROW
#undef OF_FOUR
#undef BITS
#undef NEARER
#undef IN_FLOAT
#undef LOOK_THROUGH
#undef DEFINE_LOOK
#undef KEEP_ENDS
#undef KEEP_FLOAT
#undef KEEP_HALVES
#undef KEEP_FLOAT16
#undef KEEP_BFLOAT16
#undef ZERO_FLOATS
#undef ZERO_HALVES
