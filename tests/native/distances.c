/* The kernel of distances alone, against sums in long double. */

#include "../../src/torchtap/comparison/_distance_kernel.h"

#include "numbers.h"

int main(void)
{
    const Terms terms = {1e-6, 1e-6, 0x1p23, 0x1p-126, EXPONENT};
    for (size_t n = 0; n < 3000; n = n * 5 / 4 + 1)
        for (int power = -600; power <= 600; power += 600) {
            double *r = malloc(n * sizeof *r + 1), *t = malloc(n * sizeof *t + 1);
            long double rr = 0, tr = 0, dd = 0;
            for (size_t i = 0; i < n; i++) {
                r[i] = ldexp(normal(), power);
                t[i] = bits64() % 40 ? ldexp(normal(), power) : NAN;
                if (isfinite(t[i])) {
                    rr += (long double)r[i] * r[i];
                    tr += (long double)r[i] * t[i];
                    dd += ((long double)t[i] - r[i]) * ((long double)t[i] - r[i]);
                }
            }
            Sums found;
            measure(FLOAT64, (const char *)r, FLOAT64, (const char *)t, n, &terms, &found);
            const long double scale = ldexpl(1, 2 * found.exponent);
            check(fabsl(found.rr * scale - rr) <= 1e-12L * rr, "rr", power, (long)n);
            check(fabsl(found.dd * scale - dd) <= 1e-12L * dd, "dd", power, (long)n);
            check(fabsl(found.tr * scale - tr) <= 1e-12L * (rr + dd), "tr", power, (long)n);
            check(found.compared + found.nans[1] == (int64_t)n, "count", power, (long)n);
            free(r);
            free(t);
        }
    return ended("distances");
}
