/* Sums of norms of rows, in plain C: what `_rows.c` hands addresses to. Knows nothing of Python, so that it can be built
 * and tested alone, for other processors too. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_bfloat16.h"
#include "_float_mode.h"
#include "_processor.h"

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, DTYPES };
static const size_t ITEM_BYTES[DTYPES] = {4, 8, 2, 2};

enum { VALUE, BETWEEN, START, BIAS, START_BIAS, OPERANDS }; /* the last two are one row each */
#define MOST_NORMS 5

#define CHUNK 1024 /* elements between two additions in double precision; what a 16-bit row is widened in */
/* Squares below are added up with fewer digits or not at all, squares above may have overflowed. */
#define TINY 1e-30
#define HUGE_SQUARES 1e37
#define RELEASE_BYTES (1 << 20)

static int is_same(const void *left, const void *right, size_t n)
{
    return memcmp(left, right, n * sizeof(float)) == 0;
}

/* Whether the norm number `k` is that of a difference between equal bytes; else its squares may only have vanished. */
static int is_nothing(int k, const void *const *o, size_t n)
{
    if (!o[START])
        return k == 1 && is_same(o[VALUE], o[BETWEEN], n);
    if (k == 1)
        return is_same(o[BETWEEN], o[START], n);
    return (k == 0 || (k == 4 && is_same(o[BIAS], o[START_BIAS], n))) && is_same(o[VALUE], o[BETWEEN], n);
}

typedef void (*RowsFunction)(int, size_t, size_t, const char *const *, double *);

#define TARGET
#define ISA(x) x##_plain
#include "_rows_isa.h"
#undef TARGET
#undef ISA

#ifdef HAVE_X86_CHOICE
#define HALF_BY_INSTRUCTION 1
#define TARGET AVX2
#define ISA(x) x##_avx2
#include "_rows_isa.h"
#undef TARGET
#undef ISA
#define TARGET AVX512
#define ISA(x) x##_avx512
#include "_rows_isa.h"
#undef TARGET
#undef ISA
#endif

static RowsFunction add_rows = add_rows_plain;
static const char *instructions = "plain";

static void choose_instructions(void)
{
#ifdef HAVE_X86_CHOICE
    if (has_avx2()) {
        add_rows = add_rows_avx2;
        instructions = "avx2";
    }
    if (has_avx512()) {
        add_rows = add_rows_avx512;
        instructions = "avx512";
    }
#endif
}

/* The norms of each row, added up over the rows into `sums`. */
static void sum_rows(int dtype, size_t rows, size_t width, const char *const *given, double *sums)
{
    const FloatMode mode = take_small_numbers();
    add_rows(dtype, rows, width, given, sums);
    put_back(mode);
}
