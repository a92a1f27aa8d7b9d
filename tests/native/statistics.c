/* The kernel of statistics alone, against sums in long double: every dtype, size, layout and built instruction set, with
 * one thread and several, and several that share their numbers. */

#include "../../src/torchtap/reduce/_native_kernel.h"

#include "numbers.h"

static double number_at(int dtype, const char *raw, size_t i)
{
    float half;
    switch (dtype) {
    case FLOAT32:
        return ((const float *)raw)[i];
    case FLOAT64:
        return ((const double *)raw)[i];
    case FLOAT16:
        halves_plain((const uint16_t *)raw + i, &half, 1);
        return half;
    case BFLOAT16:
        return widen_bfloat16(((const uint16_t *)raw)[i]);
    case INT8:
        return ((const int8_t *)raw)[i];
    case UINT8:
        return ((const uint8_t *)raw)[i];
    case INT16:
        return ((const int16_t *)raw)[i];
    case INT32:
        return ((const int32_t *)raw)[i];
    case INT64:
        return (double)((const int64_t *)raw)[i];
    default:
        return ((const uint8_t *)raw)[i] != 0;
    }
}

/* What a tensor may be like. */
enum { PLAIN, STRANGE, RECTIFIED, SMALL, OF_MANY_SIZES, KINDS };

/* Some of them: of each kind what is hard about it. Rectified ones begin with none, and many sizes change in blocks. */
static double number_of(int kind, size_t i)
{
    const double x = normal() * 30 + 5;
    if (kind == RECTIFIED)
        return i > 9000 && x < 20 ? (i % 2 ? 0.0 : -0.0) : x;
    if (kind == SMALL)
        return x * 1e-24;
    return kind == OF_MANY_SIZES ? ldexp(x, (int)(i / 3000 * 37 % 140) - 120) : x;
}

static void fill(int dtype, char *raw, size_t n, int kind)
{
    const int strange = kind == STRANGE;
    for (size_t i = 0; i < n; i++) {
        const double x = number_of(kind, i);
        const int odd = strange && bits64() % 50 == 0;
        const float f = odd ? (bits64() % 2 ? NAN : INFINITY) : (float)x;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        if (dtype == FLOAT32)
            ((float *)raw)[i] = f;
        else if (dtype == FLOAT64)
            ((double *)raw)[i] = odd ? (double)f : x;
        else if (dtype == FLOAT16) /* any bits are a number, or none */
            ((uint16_t *)raw)[i] = odd ? 0x7c00 | (bits64() % 2) : (uint16_t)(bits64() % 0x7c00);
        else if (dtype == BFLOAT16)
            ((uint16_t *)raw)[i] = odd ? 0x7f80 | (bits64() % 2) : (uint16_t)(bits >> 16);
        else if (ITEM_BYTES[dtype] == 1)
            raw[i] = (char)(bits64() % 3 ? bits64() : 0);
        else if (dtype == INT16)
            ((int16_t *)raw)[i] = (int16_t)bits64();
        else if (dtype == INT32)
            ((int32_t *)raw)[i] = (int32_t)bits64();
        else
            ((int64_t *)raw)[i] = (int64_t)bits64() >> (strange ? 0 : 20);
    }
}

static int near(double found, long double wanted, long double size)
{
    return fabsl((long double)found - wanted) <= 2e-6L * size;
}

static void compare(int dtype, const char *raw, size_t n, ptrdiff_t stride, const State *found)
{
    long double sum = 0, l1 = 0, squares = 0;
    double nans = 0, infs = 0, zeros = 0, low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        const double x = number_at(dtype, raw, i * (size_t)stride);
        nans += isnan(x) != 0;
        infs += isinf(x) != 0;
        zeros += x == 0;
        if (isfinite(x)) {
            sum += x;
            l1 += fabs(x);
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
    }
    const double finite = (double)n - nans - infs;
    const long double mean = finite > 0 ? sum / finite : 0;
    for (size_t i = 0; i < n; i++) {
        const double x = number_at(dtype, raw, i * (size_t)stride);
        squares += isfinite(x) ? ((long double)x - mean) * ((long double)x - mean) : 0;
    }
    const long double deviation = finite > 0 ? sqrtl(squares / finite) : 0;
    check(found->count == (double)n && found->nans == nans && found->infs == infs && found->zeros == zeros, "counts",
          dtype, (long)n);
    check(near(found->l1, l1, l1), "l1", dtype, (long)n);
    if (finite > 0) {
        check(found->low == low && found->high == high, "ends", dtype, (long)n);
        check(near(found->mean, mean, fabsl(mean) + deviation), "mean", dtype, (long)n);
        check(near(found->deviation, deviation, deviation), "deviation", dtype, (long)n);
    }
}

static const size_t SIZES[] = {0, 1, 2, 7, 8, 127, 128, 129, 1000, 4096, 8191, 8193, 70001, 300007};

static void every_size(size_t most)
{
    for (int dtype = 0; dtype < DTYPES; dtype++)
        for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES && SIZES[s] <= most; s++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = SIZES[s], bytes = ITEM_BYTES[dtype];
                char *raw = malloc(n * bytes + 1); /* as long as it must be: what is read beside it is found out */
                State found, shared;
                fill(dtype, raw, n, kind);
                measure_contiguous(dtype, raw, n, 1, &found);
                compare(dtype, raw, n, 1, &found);
                measure_contiguous(dtype, raw, n, 3, &shared);
                check(memcmp(&found, &shared, sizeof found) == 0, "threads", dtype, (long)n);
                if (n >= 8) {
                    Layout layout = {1, {n / 3}, {3}};
                    measure_layout(dtype, raw, &layout, 1, &found);
                    compare(dtype, raw, n / 3, 3, &found);
                }
                Grid grid = {NULL, 0, -32, 16, 1};
                int64_t counts[2 * 96 + 5] = {0}, total = 0;
                count_contiguous(dtype, raw, n, &grid, counts);
                for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
                    total += counts[i];
                check(total == (int64_t)n, "bins", dtype, (long)n);
                free(raw);
            }
}

#ifdef HAVE_THREADS
typedef struct {
    char *raw;
    State found;
} Shared;

static void *measure_shared(void *given)
{
    Shared *shared = given;
    measure_contiguous(FLOAT32, shared->raw, 1 << 20, 2, &shared->found);
    return NULL;
}

/* Several threads that measure the same numbers, each with threads of its own. */
static void at_once(void)
{
    pthread_t threads[4];
    Shared shared[4];
    char *raw = malloc(4 << 20);
    fill(FLOAT32, raw, 1 << 20, STRANGE);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 4; i++) {
            shared[i].raw = raw;
            if (pthread_create(threads + i, NULL, measure_shared, shared + i))
                abort();
        }
        for (int i = 0; i < 4; i++) {
            pthread_join(threads[i], NULL);
            check(memcmp(&shared[0].found, &shared[i].found, sizeof(State)) == 0, "at once", round, i);
        }
    }
    free(raw);
}
#endif

/* The largest size may be given: what emulates a processor is slow. */
int main(int given, char **sizes)
{
    const size_t most = given > 1 ? (size_t)atol(sizes[1]) : SIZE_MAX;
    every_size(most); /* plain */
    choose_instructions();
    every_size(most);
#ifdef HAVE_THREADS
    at_once();
#endif
    return ended(instructions);
}
