/* Every sum that the distance of two stretches of memory needs, in plain C: what `_distance.c` hands addresses to. Knows
 * nothing of Python, so that it can be built and tested alone, for other processors too. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../reduce/_float_mode.h"

enum { FLOAT32, FLOAT64, BFLOAT16, DTYPES };
static const size_t ITEM_BYTES[DTYPES] = {4, 8, 2};

#define BLOCK 512
#define LANES 8
#define EXPONENT UINT64_C(0x7FF0000000000000)
#define ONE_OVER UINT64_C(0x7FE0000000000000) /* minus the exponent bits of a power of two: those of its inverse */
#define ONE_OVER_LARGEST UINT64_C(0x0008000000000000) /* 2^-1023, below the normal range */
#define GUARD 1e-8                            /* as in the relative error's definition */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* What runs for every block has to become part of `add_up`: a function of its own would be built once, for the oldest
 * processor, and all clones would call that. */
#if defined(__GNUC__)
#define PART_OF_IT static inline __attribute__((always_inline))
#else
#define PART_OF_IT static inline
#endif

typedef struct {
    double rr, tt, tr, dd; /* squares and products of 2^-exponent times the numbers */
    double sum_abs, sum_rel, sum_ulp;
    double max_abs, max_rel, max_ulp, absmax, worst_reference, worst_target;
    int64_t compared, unequal, within, masks_differ, worst;
    int64_t nans[2], infs[2];
    int exponent;
} Sums;

typedef struct {
    double atol, rtol, ulp_scale, ulp_floor;
    uint64_t ulp_mask;
} Terms;

PART_OF_IT void load(int dtype, const char *from, size_t count, double *to)
{
    if (dtype == FLOAT32) {
        const float *values = (const float *)from;
        for (size_t i = 0; i < count; i++)
            to[i] = values[i];
    } else if (dtype == FLOAT64) {
        memcpy(to, from, count * sizeof(double));
    } else {
        const uint16_t *bits = (const uint16_t *)from;
        for (size_t i = 0; i < count; i++) {
            const uint32_t wide = (uint32_t)bits[i] << 16;
            float value;
            memcpy(&value, &wide, sizeof value);
            to[i] = value;
        }
    }
}

PART_OF_IT int all_finite(const double *r, const double *t, size_t count)
{
    int64_t odd = 0;
    for (size_t i = 0; i < count; i++)
        odd += !(fabs(r[i]) < INFINITY) | !(fabs(t[i]) < INFINITY);
    return odd == 0;
}

PART_OF_IT double ulp_unit_inverse(double size, const Terms *terms)
{
    uint64_t bits;
    memcpy(&bits, &size, sizeof bits);
    bits &= terms->ulp_mask;
    double power;
    memcpy(&power, &bits, sizeof power);
    power = power > terms->ulp_floor ? power : terms->ulp_floor;
    memcpy(&bits, &power, sizeof bits);
    bits = ONE_OVER - bits;
    bits = bits ? bits : ONE_OVER_LARGEST;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* `count` finite pairs, a multiple of LANES; lanes keep the additions apart, so that they vectorize as written. */
PART_OF_IT void add_block(const double *r, const double *t, size_t count, double scale, const Terms *terms,
                             Sums *sums, double *largest)
{
    double rr[LANES] = {0}, tt[LANES] = {0}, tr[LANES] = {0}, dd[LANES] = {0}, sa[LANES] = {0}, sr[LANES] = {0};
    double su[LANES] = {0}, ma[LANES] = {0}, mr[LANES] = {0}, mu[LANES] = {0}, am[LANES] = {0};
    double unequal[LANES] = {0}, within[LANES] = {0};
    for (size_t i = 0; i < count; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            const double x = r[i + j], y = t[i + j];
            const double d = fabs(y - x), a = fabs(x);
            const double u = x * scale, v = y * scale, w = v - u;
            rr[j] += u * u;
            tt[j] += v * v;
            tr[j] += u * v;
            dd[j] += w * w;
            sa[j] += d;
            ma[j] = d > ma[j] ? d : ma[j];
            am[j] = a > am[j] ? a : am[j];
            unequal[j] += d != 0 ? 1.0 : 0.0;
            within[j] += d <= terms->atol + terms->rtol * a ? 1.0 : 0.0;
            const double relative = d / (a + GUARD);
            sr[j] += relative;
            mr[j] = relative > mr[j] ? relative : mr[j];
            const double units = d * ulp_unit_inverse(a, terms) * terms->ulp_scale;
            su[j] += units;
            mu[j] = units > mu[j] ? units : mu[j];
        }
    }
    *largest = 0;
    for (int j = 0; j < LANES; j++) {
        sums->rr += rr[j];
        sums->tt += tt[j];
        sums->tr += tr[j];
        sums->dd += dd[j];
        sums->sum_abs += sa[j];
        sums->sum_rel += sr[j];
        sums->sum_ulp += su[j];
        sums->unequal += (int64_t)unequal[j];
        sums->within += (int64_t)within[j];
        *largest = ma[j] > *largest ? ma[j] : *largest;
        sums->absmax = am[j] > sums->absmax ? am[j] : sums->absmax;
        sums->max_rel = mr[j] > sums->max_rel ? mr[j] : sums->max_rel;
        sums->max_ulp = mu[j] > sums->max_ulp ? mu[j] : sums->max_ulp;
    }
    sums->compared += (int64_t)count;
}

static void add_one(double x, double y, int64_t at, double scale, const Terms *terms, Sums *sums)
{
    const int odd_x = !(fabs(x) < INFINITY), odd_y = !(fabs(y) < INFINITY);
    if (odd_x || odd_y) {
        sums->nans[0] += x != x;
        sums->nans[1] += y != y;
        sums->infs[0] += fabs(x) == INFINITY;
        sums->infs[1] += fabs(y) == INFINITY;
        const int same = x == y || (x != x && y != y);
        sums->masks_differ += !same;
        sums->unequal += !same;
        return;
    }
    double xs[LANES] = {0}, ys[LANES] = {0}, largest;
    xs[0] = x;
    ys[0] = y;
    add_block(xs, ys, LANES, scale, terms, sums, &largest);
    /* The other lanes were zeros on both sides: they counted as compared and within, and added nothing else. */
    sums->compared -= LANES - 1;
    sums->within -= LANES - 1;
    if (largest > sums->max_abs) {
        sums->max_abs = largest;
        sums->worst = at;
        sums->worst_reference = x;
        sums->worst_target = y;
    }
}

FOR_EACH_PROCESSOR
static void add_up(int left, const char *reference, int right, const char *target, size_t count, double scale,
                   const Terms *terms, Sums *sums)
{
    double r[BLOCK], t[BLOCK], largest;
    for (size_t at = 0; at < count; at += BLOCK) {
        const size_t here = count - at < BLOCK ? count - at : BLOCK;
        load(left, reference + at * ITEM_BYTES[left], here, r);
        load(right, target + at * ITEM_BYTES[right], here, t);
        if (here % LANES || !all_finite(r, t, here)) {
            for (size_t i = 0; i < here; i++)
                add_one(r[i], t[i], (int64_t)(at + i), scale, terms, sums);
            continue;
        }
        if (scale == 1)
            add_block(r, t, here, 1, terms, sums, &largest);
        else
            add_block(r, t, here, scale, terms, sums, &largest);
        if (largest > sums->max_abs) {
            for (size_t i = 0; i < here; i++)
                if (fabs(t[i] - r[i]) == largest) {
                    sums->max_abs = largest;
                    sums->worst = (int64_t)(at + i);
                    sums->worst_reference = r[i];
                    sums->worst_target = t[i];
                    break;
                }
        }
    }
}

/* The largest finite magnitude on either side. */
static double size_of(int left, const char *reference, int right, const char *target, size_t count)
{
    double r[BLOCK], t[BLOCK], size = 0;
    for (size_t at = 0; at < count; at += BLOCK) {
        const size_t here = count - at < BLOCK ? count - at : BLOCK;
        load(left, reference + at * ITEM_BYTES[left], here, r);
        load(right, target + at * ITEM_BYTES[right], here, t);
        for (size_t i = 0; i < here; i++)
            if (fabs(r[i]) < INFINITY && fabs(t[i]) < INFINITY)
                size = fmax(size, fmax(fabs(r[i]), fabs(t[i])));
    }
    return size;
}

static void measure(int left, const char *reference, int right, const char *target, size_t count, const Terms *terms,
                    Sums *sums)
{
    const FloatMode mode = take_small_numbers();
    memset(sums, 0, sizeof *sums);
    sums->max_abs = -1;
    add_up(left, reference, right, target, count, 1, terms, sums);
    const double squares = sums->rr + sums->tt;
    if (!(squares > 1e-250 && squares < 1e300)) {
        const double size = size_of(left, reference, right, target, count);
        int exponent = 0;
        if (size > 0)
            frexp(size, &exponent);
        if (exponent > 400 || exponent < -400) { /* squares have overflowed or vanished */
            exponent = exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent;
            memset(sums, 0, sizeof *sums);
            sums->max_abs = -1;
            sums->exponent = exponent;
            add_up(left, reference, right, target, count, ldexp(1, -exponent), terms, sums);
        }
    }
    put_back(mode);
}
