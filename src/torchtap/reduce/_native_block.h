/* The statistics of one block of numbers, from one look at it where the block is like those before.
 *
 * Included by _native.c once for each kind of number and instruction set, with these defined:
 *   S, T, WIDEN(s)   the type in memory, the type to compute in, and the way from one to the other
 *   LANES            how many are handled side by side
 *   IS_ZERO(s)       where zero is told in memory with less than WIDEN
 *   LARGEST, TINY    the largest finite T, and the sum of squares below which single squares may have vanished
 *   LOOK             what a first look finds, and, where there is a faster one than the plain loops, LOOK_AT
 *   STRETCHES        where numbers whose squares vanish are squared as multiples of them
 *   TARGET           the function attribute that chooses the instruction set
 *   NAME(x)          makes names unique
 *
 * Plain C in lanes: compilers turn the loops over `lane` into vector instructions without any licence to reorder
 * floating-point arithmetic. Sixteen elements are added up as a tree in T, then go on in double, so that the rounding
 * of T enters four times and not once for each element. Squares are of distances from a center near the mean: that
 * of the block before, or none where the mean is near zero. Where it turns out to be far off, the block, still in
 * the cache, is looked at again.
 */

#define GROUP (8 * LANES)
#ifndef IS_ZERO
#define IS_ZERO(s) (WIDEN(s) == 0)
#endif
#define TREE(op, a) (((a##0 op a##1) op (a##2 op a##3)) op ((a##4 op a##5) op (a##6 op a##7)))
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))
#define LOADED(p)                                                                                                 \
    const T x0 = WIDEN((p)[lane]), x1 = WIDEN((p)[LANES + lane]), x2 = WIDEN((p)[2 * LANES + lane]),              \
            x3 = WIDEN((p)[3 * LANES + lane]), x4 = WIDEN((p)[4 * LANES + lane]),                                 \
            x5 = WIDEN((p)[5 * LANES + lane]), x6 = WIDEN((p)[6 * LANES + lane]),                                 \
            x7 = WIDEN((p)[7 * LANES + lane])
#define FROM_CENTER(x) ((x)-center)
#define FROM_ZERO(x) (x)
#define AS_IT_IS(d) (d)
#define STRETCHED(d) ((d)*scale)
#define SQUARE(of, d) (of(d) * of(d))
#define DISTANCES(from, of)                                                                                       \
    const T d0 = from(x0), d1 = from(x1), d2 = from(x2), d3 = from(x3), d4 = from(x4), d5 = from(x5),             \
            d6 = from(x6), d7 = from(x7);                                                                         \
    const T q0 = SQUARE(of, d0), q1 = SQUARE(of, d1), q2 = SQUARE(of, d2), q3 = SQUARE(of, d3),                   \
            q4 = SQUARE(of, d4), q5 = SQUARE(of, d5), q6 = SQUARE(of, d6), q7 = SQUARE(of, d7)
#define MAGNITUDES                                                                                                \
    const T a0 = FABS(x0), a1 = FABS(x1), a2 = FABS(x2), a3 = FABS(x3), a4 = FABS(x4), a5 = FABS(x5),             \
            a6 = FABS(x6), a7 = FABS(x7)
#define CHOSEN(pick, x, so_far)                                                                                   \
    do {                                                                                                          \
        const T c0 = pick(x##0, x##1), c1 = pick(x##2, x##3), c2 = pick(x##4, x##5), c3 = pick(x##6, x##7);       \
        const T c4 = pick(c0, c1), c5 = pick(c2, c3), c6 = pick(c4, c5);                                          \
        (so_far) = pick(c6, (so_far));                                                                            \
    } while (0)
/* One group; `how` the sums of this group go into `d`, `q` and `a`: = or +=. */
#define ONE_GROUP(p, from, of, how)                                                                               \
    do {                                                                                                          \
        LOADED(p);                                                                                                \
        DISTANCES(from, of);                                                                                      \
        MAGNITUDES;                                                                                               \
        d how TREE(+, d);                                                                                         \
        q how TREE(+, q);                                                                                         \
        a how TREE(+, a);                                                                                         \
        CHOSEN(LESS, x, low[lane]);                                                                               \
        CHOSEN(MORE, x, high[lane]);                                                                              \
        CHOSEN(LESS, a, least[lane]);                                                                             \
    } while (0)
#define KEPT                                                                                                      \
    drift[lane] += (double)d;                                                                                     \
    squares[lane] += (double)q;                                                                                   \
    l1[lane] += (double)a
#define FIRST_LOOK(from, of)                                                                                      \
    do {                                                                                                          \
        size_t i = 0;                                                                                             \
        for (; i + 2 * GROUP <= n; i += 2 * GROUP)                                                                \
            for (int lane = 0; lane < LANES; lane++) {                                                            \
                T d, q, a;                                                                                        \
                ONE_GROUP(x + i, from, of, =);                                                                    \
                ONE_GROUP(x + i + GROUP, from, of, +=);                                                           \
                KEPT;                                                                                             \
            }                                                                                                     \
        if (i < n)                                                                                                \
            for (int lane = 0; lane < LANES; lane++) {                                                            \
                T d, q, a;                                                                                        \
                ONE_GROUP(x + i, from, of, =);                                                                    \
                KEPT;                                                                                             \
            }                                                                                                     \
    } while (0)
#define SUM_OF_LANES(x)                                                                                           \
    for (int half = LANES / 2; half; half /= 2)                                                                   \
        for (int lane = 0; lane < half; lane++)                                                                   \
    (x)[lane] += (x)[lane + half]

/* One look of `careful` at eight numbers or fewer. The loop for whole eights has a fixed length, for the compiler to
 * turn it into vector instructions. */
#define CAREFUL_LOOK(look)                                                                                        \
    do {                                                                                                          \
        for (size_t i = 0; i < whole; i += 8) {                                                                   \
            const S *p = x + i;                                                                                   \
            for (int lane = 0; lane < 8; lane++)                                                                  \
                look;                                                                                             \
        }                                                                                                         \
        const S *p = x + whole;                                                                                   \
        for (int lane = 0; lane < (int)(n - whole); lane++)                                                       \
            look;                                                                                                 \
    } while (0)
#define LOOK_AT_VALUES                                                                                            \
    {                                                                                                             \
        const double v = (double)WIDEN(p[lane]), size = fabs(v);                                                  \
        /* Comparisons are false for NaN. */                                                                      \
        const double safe = size <= (double)LARGEST ? v : 0.0;                                                    \
        const double under = size <= (double)LARGEST ? v : INFINITY;                                              \
        const double over = size <= (double)LARGEST ? v : -INFINITY;                                              \
        sum[lane] += safe * 0x1p-13; /* a block's sum may overflow where its mean does not */                     \
        l1[lane] += fabs(safe);                                                                                   \
        low[lane] = LESS(under, low[lane]);                                                                       \
        high[lane] = MORE(over, high[lane]);                                                                      \
        strange[lane] += size <= (double)LARGEST ? 0.0 : 1.0;                                                     \
        nans[lane] += v != v ? 1.0 : 0.0;                                                                         \
        zeros[lane] += v == 0.0 ? 1.0 : 0.0;                                                                      \
    }
#define LOOK_AT_DISTANCES                                                                                         \
    {                                                                                                             \
        const double v = (double)WIDEN(p[lane]);                                                                  \
        const double d = fabs(v) <= (double)LARGEST ? v * scale - scaled_center : 0.0;                            \
        drift[lane] += d;                                                                                         \
        squares[lane] += d * d;                                                                                   \
    }

/* Any numbers at all: not finite, near the ends of the range, any count. In double throughout. */
TARGET static void NAME(careful)(const S *x, size_t n, State *out)
{
    double sum[8] = {0}, l1[8] = {0}, low[8], high[8], strange[8] = {0}, nans[8] = {0}, zeros[8] = {0};
    for (int lane = 0; lane < 8; lane++) {
        low[lane] = INFINITY;
        high[lane] = -INFINITY;
    }
    const size_t whole = n & ~(size_t)7;
    CAREFUL_LOOK(LOOK_AT_VALUES);
    State s = BLANK;
    s.count = (double)n;
    double total = 0, bad = 0;
    for (int lane = 0; lane < 8; lane++) {
        total += sum[lane];
        bad += strange[lane];
        s.l1 += l1[lane];
        s.nans += nans[lane];
        s.zeros += zeros[lane];
        s.low = LESS(low[lane], s.low);
        s.high = MORE(high[lane], s.high);
    }
    s.infs = bad - s.nans;
    const double count = (double)n - bad;
    if (count > 0) {
        /* Of one value only, the mean is that value and not what rounding makes of it. */
        const double center = s.low == s.high ? s.low : total / count * 0x1p13;
        /* Squares of very large and very small numbers are taken of their multiples. */
        const double size = fabs(s.low) > fabs(s.high) ? fabs(s.low) : fabs(s.high);
        const double scale = size > 0x1p480 ? 0x1p-540 : size < 0x1p-400 ? 0x1p500 : 1;
        const double scaled_center = center * scale;
        double drift[8] = {0}, squares[8] = {0};
        CAREFUL_LOOK(LOOK_AT_DISTANCES);
        double drifted = 0, squared = 0;
        for (int lane = 0; lane < 8; lane++) {
            drifted += drift[lane];
            squared += squares[lane];
        }
        drifted /= count;
        squared -= count * drifted * drifted;
        set_mean(&s, center, drifted / scale);
        s.deviation = squared > 0 ? sqrt(squared / count) / scale : 0;
    }
    *out = s;
}

/* Sums of distances from `center` and of the squares of their multiples; `n` is a multiple of GROUP. */
TARGET static void NAME(second_look)(const S *x, size_t n, T center, T scale, double *drifted, double *squared)
{
    double drift[LANES] = {0}, squares[LANES] = {0};
    for (size_t i = 0; i < n; i += GROUP) {
        const S *p = x + i;
        for (int lane = 0; lane < LANES; lane++) {
            LOADED(p);
            DISTANCES(FROM_CENTER, STRETCHED);
            drift[lane] += (double)TREE(+, d);
            squares[lane] += (double)TREE(+, q);
        }
    }
    SUM_OF_LANES(drift);
    SUM_OF_LANES(squares);
    *drifted = drift[0];
    *squared = squares[0];
}

TARGET static double NAME(zeros)(const S *x, size_t n)
{
    LANE_INTEGER zeros[LANES] = {0};
    double total = 0;
    for (size_t i = 0; i < n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            zeros[lane] += IS_ZERO(x[i + lane]);
    for (int lane = 0; lane < LANES; lane++)
        total += (double)zeros[lane];
    return total;
}

/* A first center, from the first group, and about how large its numbers are. */
TARGET static double NAME(guess)(const S *x, double *size)
{
    double sum[LANES] = {0}, spread[LANES] = {0};
    for (size_t i = 0; i < GROUP; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sum[lane] += (double)WIDEN(x[i + lane]);
    SUM_OF_LANES(sum);
    const double mean = sum[0] / GROUP;
    for (size_t i = 0; i < GROUP; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            spread[lane] += fabs((double)WIDEN(x[i + lane]) - mean);
    SUM_OF_LANES(spread);
    *size = fabs(mean) + spread[0] / GROUP;
    return blunt(mean, spread[0] / GROUP);
}

#ifndef LOOK_AT
#define LOOK_AT NAME(look)
/* The first look, at whole groups. */
TARGET static void NAME(look)(const S *x, size_t n, T center, T scale, int counting, LOOK *out)
{
    (void)counting;
    double drift[LANES] = {0}, squares[LANES] = {0}, l1[LANES] = {0};
    T low[LANES], high[LANES], least[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = high[lane] = WIDEN(x[lane]);
        least[lane] = FABS(low[lane]);
    }
    if (scale != 1)
        FIRST_LOOK(FROM_CENTER, STRETCHED);
    else if (center == 0)
        FIRST_LOOK(FROM_ZERO, AS_IT_IS);
    else
        FIRST_LOOK(FROM_CENTER, AS_IT_IS);
    SUM_OF_LANES(drift);
    SUM_OF_LANES(squares);
    SUM_OF_LANES(l1);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) {
            low[lane] = LESS(low[lane], low[lane + half]);
            high[lane] = MORE(high[lane], high[lane + half]);
            least[lane] = LESS(least[lane], least[lane + half]);
        }
    out->drift = drift[0];
    out->squares = squares[0];
    out->l1 = l1[0];
    out->low = low[0];
    out->high = high[0];
    out->least = least[0];
    out->zeros = -1;
}

#endif

/* What to multiply distances with before they are squared, of numbers up to `size`, if that is below `small`: a power of
 * two. Only the smallest numbers, as the gradients of early layers are, need any. */
TARGET static T NAME(scale_for)(double size, double small)
{
#ifdef STRETCHES
    int exponent;
    if (size > 0 && size < small) {
        frexp(size, &exponent);
        return (T)ldexp(1, -exponent < 126 ? -exponent : 126);
    }
#endif
    (void)size, (void)small;
    return 1;
}

/* `n` is a multiple of GROUP. `before` is the state of values nearby, or NULL. */
TARGET static void NAME(block)(const S *x, size_t n, State *out, const State *before)
{
    double size = before ? MORE(-before->low, before->high) : 0;
    T center = (T)(before ? center_of(before) : NAME(guess)(x, &size));
    T scale = NAME(scale_for)(size, 0x1p-50);
    if (!(center - center == 0))
        center = 0;
    const int counting = before ? before->zeros > 0 : NAME(zeros)(x, GROUP) > 0;
    LOOK look;
    LOOK_AT(x, n, center, scale, counting, &look);
    /* A sum of magnitudes that is finite had no NaN, no infinity and no overflow in it. */
    if (!(look.l1 - look.l1 == 0)) {
        NAME(careful)(x, n, out);
        return;
    }
    State s = {(double)n, 0, 0, 0, 0, 0, (double)look.low, (double)look.high, look.l1, 0};
    if (look.least == 0)
        s.zeros = look.zeros < 0 ? NAME(zeros)(x, n) : look.zeros;
    if (s.low == s.high) {
        s.mean = s.low;
        *out = s;
        return;
    }
    const T other = NAME(scale_for)(MORE(-s.low, s.high), 0x1p-40);
    if (other != scale && (look.squares < TINY || !(look.squares - look.squares == 0))) {
        /* The numbers before were of another size: of these, squares have vanished or overflowed. */
        scale = other;
        LOOK_AT(x, n, center, scale, counting, &look);
    }
    /* Squares of what they are multiples of, in double, where none of them vanish. */
    const double unit = (double)scale * (double)scale;
    double drifted = look.drift / (double)n, squared = look.squares, excess = (double)n * drifted * drifted;
    if (excess > 0.5 * (squared / unit)) {
        const double left = squared / unit - excess;
        center = (T)blunt((double)center + drifted, left > 1e-3 * excess ? sqrt(left / (double)n) : 0);
        NAME(second_look)(x, n, center, scale, &drifted, &squared);
        drifted /= (double)n;
        excess = (double)n * drifted * drifted;
    }
    /* Squares that overflowed or vanished in T, or so little spread that what is left is rounding. */
    if (!(squared - squared == 0) || squared < TINY || !(excess <= 0.5 * (squared / unit))) {
        NAME(careful)(x, n, out);
        return;
    }
    set_mean(&s, (double)center, drifted);
    s.deviation = sqrt((squared / unit - excess) / (double)n);
    *out = s;
}

#undef GROUP
#undef CAREFUL_LOOK
#undef LOOK_AT_VALUES
#undef LOOK_AT_DISTANCES
#undef TREE
#undef LESS
#undef MORE
#undef LOADED
#undef FROM_CENTER
#undef FROM_ZERO
#undef AS_IT_IS
#undef STRETCHED
#undef SQUARE
#undef DISTANCES
#undef MAGNITUDES
#undef CHOSEN
#undef ONE_GROUP
#undef KEPT
#undef FIRST_LOOK
#undef SUM_OF_LANES
#undef S
#undef WIDEN
#undef IS_ZERO
#undef NAME
#undef LOOK_AT
#undef STRETCHES
