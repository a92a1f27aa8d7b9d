/* From rows of raw memory to the sums of their norms. Included by _rows.c once for each instruction set. */

/* Each of these adds the squares of one chunk to `squares`. `S` is what is in memory, `T` what is added up in. */
#define LANES 16
/* A short loop would be unrolled before it is made one vector operation, and then stay scalar. */
#define ONE_VECTOR _Pragma("GCC unroll 1")
#define EACH_LANE(body)                                                                                           \
    for (; i + LANES <= n; i += LANES)                                                                            \
        ONE_VECTOR for (size_t l = 0; l < LANES; l++) {                                                           \
            const size_t j = i + l;                                                                               \
            body                                                                                                  \
        }                                                                                                         \
    for (; i < n; i++) {                                                                                          \
        const size_t j = i, l = 0;                                                                                \
        body                                                                                                      \
    }
#define TOTAL(to, lanes)                                                                                          \
    do {                                                                                                          \
        double total = 0;                                                                                         \
        for (size_t l = 0; l < LANES; l++)                                                                        \
            total += (double)lanes[l];                                                                            \
        to = total;                                                                                               \
    } while (0)

#define DEFINE_SQUARES(KIND, S, T)                                                                                \
    TARGET static void ISA(KIND##_of_two)(const S *restrict a, const S *restrict b, size_t n, double *found)      \
    {                                                                                                             \
        T whole[LANES] = {0}, moved[LANES] = {0};                                                                 \
        size_t i = 0;                                                                                             \
        EACH_LANE(const T x = a[j]; const T d = x - (T)b[j]; whole[l] += x * x; moved[l] += d * d;)               \
        TOTAL(found[0], whole);                                                                                   \
        TOTAL(found[1], moved);                                                                                   \
    }                                                                                                             \
    TARGET static void ISA(KIND##_of_three)(const S *restrict a, const S *restrict b,                             \
                                            const S *restrict c, size_t n, double *found)                         \
    {                                                                                                             \
        T near[LANES] = {0}, far[LANES] = {0}, whole[LANES] = {0}, old[LANES] = {0};                              \
        size_t i = 0;                                                                                             \
        EACH_LANE(const T x = a[j]; const T y = b[j]; const T z = c[j]; const T d = x - y; const T e = y - z;     \
                  near[l] += d * d; far[l] += e * e; whole[l] += x * x; old[l] += z * z;)                         \
        TOTAL(found[0], near);                                                                                    \
        TOTAL(found[1], far);                                                                                     \
        TOTAL(found[2], whole);                                                                                   \
        TOTAL(found[3], old);                                                                                     \
    }                                                                                                             \
    TARGET static void ISA(KIND##_of_five)(const S *restrict a, const S *restrict b, const S *restrict c,         \
                                      const S *restrict p, const S *restrict q, size_t n, double *found)          \
    {                                                                                                             \
        T near[LANES] = {0}, far[LANES] = {0}, whole[LANES] = {0}, old[LANES] = {0}, bare[LANES] = {0};           \
        size_t i = 0;                                                                                             \
        EACH_LANE(const T x = a[j]; const T y = b[j]; const T z = c[j]; const T d = x - y; const T e = y - z;     \
                  const T v = x - (T)p[j]; const T w = z - (T)q[j]; const T f = v - (y - (T)q[j]);                \
                  near[l] += d * d; far[l] += e * e; whole[l] += v * v; old[l] += w * w; bare[l] += f * f;)       \
        TOTAL(found[0], near);                                                                                    \
        TOTAL(found[1], far);                                                                                     \
        TOTAL(found[2], whole);                                                                                   \
        TOTAL(found[3], old);                                                                                     \
        TOTAL(found[4], bare);                                                                                    \
    }                                                                                                             \
    TARGET static void ISA(KIND)(const void *const *o, size_t n, double *found)                                   \
    {                                                                                                             \
        if (o[BIAS])                                                                                              \
            ISA(KIND##_of_five)(o[VALUE], o[BETWEEN], o[START], o[BIAS], o[START_BIAS], n, found);                \
        else if (o[START])                                                                                        \
            ISA(KIND##_of_three)(o[VALUE], o[BETWEEN], o[START], n, found);                                       \
        else                                                                                                      \
            ISA(KIND##_of_two)(o[VALUE], o[BETWEEN], n, found);                                                   \
    }

DEFINE_SQUARES(squares_float, float, float)
DEFINE_SQUARES(squares_careful, float, double)
DEFINE_SQUARES(squares_double, double, double)

#include "_halves_isa.h"

TARGET static void ISA(widen)(int dtype, const uint16_t *given, size_t n, float *made)
{
    if (dtype == FLOAT16) {
        ISA(halves)(given, made, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        made[i] = widen_bfloat16(given[i]);
}

/* Add the norm of each row to `sums`. */
TARGET static void ISA(add_rows)(int dtype, size_t rows, size_t width, const char *const *given, double *sums)
{
    const int norms = given[BIAS] ? 5 : given[START] ? 4 : 2;
    const size_t bytes = ITEM_BYTES[dtype];
    float room[OPERANDS][CHUNK];
    for (size_t row = 0; row < rows; row++) {
        double squares[MOST_NORMS] = {0};
        for (size_t begin = 0; begin < width; begin += CHUNK) {
            const size_t n = width - begin < CHUNK ? width - begin : CHUNK;
            const void *now[OPERANDS];
            double found[MOST_NORMS];
            for (int i = 0; i < OPERANDS; i++) {
                now[i] = given[i] ? given[i] + ((i < BIAS ? row * width : 0) + begin) * bytes : NULL;
                if (now[i] && (dtype == FLOAT16 || dtype == BFLOAT16)) {
                    ISA(widen)(dtype, now[i], n, room[i]);
                    now[i] = room[i];
                }
            }
            if (dtype == FLOAT64)
                ISA(squares_double)(now, n, found);
            else {
                int careful = 0;
                ISA(squares_float)(now, n, found);
                for (int k = 0; k < norms; k++)
                    careful |= !(found[k] > TINY && found[k] < HUGE_SQUARES) && !(found[k] == 0 && is_nothing(k, now, n));
                if (careful)
                    ISA(squares_careful)(now, n, found);
            }
            for (int k = 0; k < norms; k++)
                squares[k] += found[k];
        }
        for (int k = 0; k < norms; k++)
            sums[k] += sqrt(squares[k]);
    }
}

#undef LANES
#undef ONE_VECTOR
#undef EACH_LANE
#undef TOTAL
#undef DEFINE_SQUARES
