/* Numbers from a fixed seed, and what every program here ends with. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t seed = 88172645463325252u;
static long checks, failures;

static uint64_t bits64(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

static double uniform(void)
{
    return (double)(bits64() >> 11) * 0x1p-53;
}

/* About normal, which is all that is needed. */
static inline double normal(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += uniform();
    return sum;
}

static void check(int holds, const char *what, long a, long b)
{
    checks++;
    if (!holds && failures++ < 20)
        fprintf(stderr, "wrong: %s (%ld, %ld)\n", what, a, b);
}

static int ended(const char *what)
{
    printf("%s: %ld checks, %ld wrong\n", what, checks, failures);
    return failures != 0;
}
