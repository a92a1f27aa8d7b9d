/* All statistics of a tensor from one read of its memory, in plain C: what `_native.c` hands addresses to.
 *
 * Memory is read in blocks that stay in the cache (_native_block.h); blocks are merged in double precision
 * (_native_state.h). It guarantees:
 * - the answer does not depend on the number of threads: pieces have a fixed size and merge in their order;
 * - it does not depend on whether the processor is told to flush small numbers to zero (_float_mode.h);
 * - no instruction is used that the processor was not asked about.
 *
 * Knows nothing of Python, so that it can be built and tested alone, for other processors too.
 */

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if !defined(_WIN32)
#include <pthread.h>
#include <time.h>
#define HAVE_THREADS 1
#endif

#include "_bfloat16.h"
#include "_float_mode.h"
#include "_processor.h"

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, UINT8, INT16, INT32, INT64, BOOL, DTYPES };
static const size_t ITEM_BYTES[DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};

#define BLOCK 8192            /* elements of up to four bytes: 32 KiB, which the second-level cache surely holds */
#define PIECE_BYTES (1 << 18) /* what a thread takes at a time: long enough for the processor to fetch ahead */
#define MOST_THREADS 64       /* memory is saturated long before */
#define DOUBLE_COUNTS (INT64_C(1) << 53)
#define MOST_DIMENSIONS 64    /* as in torch */
/* Below this, handing the interpreter over and waiting to get it back costs more than the work. */
#define RELEASE_BYTES (1 << 20)

#include "_native_state.h"

/* Bins: equal ones between `edges`, or, without, those of octaves.py: 2**bits to each power of two. */
typedef struct {
    const double *edges;
    ptrdiff_t bins, low, high, bits;
} Grid;

typedef void (*BlockFunction)(int, const char *, size_t, State *, const State *);
typedef void (*CountFunction)(int, const char *, size_t, const Grid *, int64_t *);

#define TARGET
#define ISA(x) x##_plain
#include "_native_isa.h"
#undef TARGET
#undef ISA

#ifdef HAVE_X86_CHOICE
#define HALF_BY_INSTRUCTION 1
#include "_native_look_avx2.h"
#define LOOK_AT_FLOAT look_float_avx2
#define LOOK_AT_BFLOAT16 look_bfloat16_avx2
#define LOOK_AT_FLOAT16 look_float16_avx2
#define LOOK_AT_BYTES look_bytes_avx2
#define TARGET AVX2
#define ISA(x) x##_avx2
#include "_native_isa.h"
#undef TARGET
#undef ISA
#undef LOOK_AT_FLOAT
#undef LOOK_AT_BFLOAT16
#undef LOOK_AT_FLOAT16
#undef LOOK_AT_BYTES
#include "_native_look_avx512.h"
#define LOOK_AT_FLOAT look_float_avx512
#define LOOK_AT_BFLOAT16 look_bfloat16_avx512
#define LOOK_AT_FLOAT16 look_float16_avx512
#define LOOK_AT_BYTES look_bytes_avx512
#define LOOK_AT_INT64 look_int64_avx512
#define TARGET AVX512
#define ISA(x) x##_avx512
#include "_native_isa.h"
#undef TARGET
#undef ISA
#undef LOOK_AT_FLOAT
#undef LOOK_AT_BFLOAT16
#undef LOOK_AT_FLOAT16
#undef LOOK_AT_BYTES
#undef LOOK_AT_INT64
#endif

static BlockFunction block = block_plain;
static CountFunction count = count_plain;
static const char *instructions = "plain";

static void choose_instructions(void)
{
#ifdef HAVE_X86_CHOICE
    if (has_avx2()) {
        block = block_avx2;
        count = count_avx2;
        instructions = "avx2";
    }
    if (has_avx512()) {
        block = block_avx512;
        count = count_avx512;
        instructions = "avx512";
    }
#endif
}

static size_t block_length(int dtype)
{
    switch (dtype) {
    case FLOAT32:
    case FLOAT16:
    case BFLOAT16:
        return BLOCK;
    case INT32:
    case INT64:
        return BLOCK / 4;
    default:
        return BLOCK / 2;
    }
}

static void measure_span(int dtype, const char *raw, size_t n, State *out)
{
    const size_t most = block_length(dtype), bytes = ITEM_BYTES[dtype];
    const State *before = NULL;
    State one;
    *out = BLANK;
    while (n) {
        const size_t now = n < most ? n : most;
        block(dtype, raw, now, &one, before);
        merge(out, &one);
        before = finite_in(&one) > 0 ? &one : NULL;
        raw += now * bytes;
        n -= now;
    }
}

#ifdef HAVE_THREADS
static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
#endif

typedef struct {
    int dtype;
    const char *raw;
    size_t n, piece, pieces, next;
    State *states;
#ifdef HAVE_THREADS
    pthread_t caller;
    double finished; /* when the caller had no piece left */
#endif
} Work;

static void *take_pieces(void *given)
{
    Work *work = given;
    const FloatMode mode = take_small_numbers();
    for (;;) {
#ifdef HAVE_THREADS
        const size_t index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
#else
        const size_t index = work->next++;
#endif
        if (index >= work->pieces)
            break;
        const size_t start = index * work->piece, left = work->n - start;
        measure_span(work->dtype, work->raw + start * ITEM_BYTES[work->dtype],
                     left < work->piece ? left : work->piece, work->states + index);
    }
    put_back(mode);
#ifdef HAVE_THREADS
    if (pthread_equal(pthread_self(), work->caller))
        work->finished = seconds_now();
#endif
    return NULL;
}

#ifdef HAVE_THREADS
/* Runs a function in so many threads at once, this one among them, and comes back when all are done. That of OpenMP, if torch
 * uses it, is handed in (kernel.py): its threads are awake where torch has just computed, and there are no more of them
 * than torch was told to have. */
typedef void (*Pool)(void (*)(void *), void *, unsigned, unsigned);
static Pool pool = NULL;

static void take_pieces_in_pool(void *given)
{
    take_pieces(given);
}

/* A thread that cannot be started leaves its pieces to the others. */
static void take_pieces_in_own_threads(Work *work, int threads)
{
    pthread_t others[MOST_THREADS];
    int started = 0;
    while (started < threads - 1 && pthread_create(others + started, NULL, take_pieces, work) == 0)
        started++;
    take_pieces(work);
    for (int i = 0; i < started; i++)
        pthread_join(others[i], NULL);
}

/* Threads that do not run, because another process has their core, cost more than they give: the caller takes all pieces and
 * then waits for them to notice. After such a wait the next tensors are measured by the caller alone, then it tries again. */
#define LONG_WAIT 20e-6 /* seconds; and more than half of the time that the caller worked */
#define ALONE 64        /* tensors */
static int alone = 0;

static int others_are_busy(void)
{
    const int left = __atomic_load_n(&alone, __ATOMIC_RELAXED);
    if (left > 0)
        __atomic_store_n(&alone, left - 1, __ATOMIC_RELAXED);
    return left > 0;
}

static void judge_wait(double begun, double finished)
{
    const double wait = seconds_now() - finished;
    if (wait > LONG_WAIT && wait > (finished - begun) / 2)
        __atomic_store_n(&alone, ALONE, __ATOMIC_RELAXED);
}

/* The same as piece after piece; 0 where there is no memory for the states of all pieces. */
static int measure_by_threads(Work *work, int threads, State *out)
{
    work->states = malloc(work->pieces * sizeof(State));
    if (!work->states)
        return 0;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if ((size_t)threads > work->pieces)
        threads = (int)work->pieces;
    const double begun = seconds_now();
    work->caller = pthread_self();
    work->finished = begun;
    if (pool)
        pool(take_pieces_in_pool, work, (unsigned)threads, 0);
    else
        take_pieces_in_own_threads(work, threads);
    judge_wait(begun, work->finished);
    *out = BLANK;
    for (size_t i = 0; i < work->pieces; i++)
        merge(out, work->states + i);
    free(work->states);
    return 1;
}
#endif

static void measure_contiguous(int dtype, const char *raw, size_t n, int threads, State *out)
{
    const size_t piece = PIECE_BYTES / ITEM_BYTES[dtype]; /* whole blocks, of every dtype */
#ifdef HAVE_THREADS
    if (threads > 1 && n > piece && !others_are_busy()) {
        Work work = {.dtype = dtype, .raw = raw, .n = n, .piece = piece, .pieces = (n + piece - 1) / piece};
        if (measure_by_threads(&work, threads, out))
            return;
    }
#endif
    const FloatMode mode = take_small_numbers();
    State one;
    *out = BLANK;
    for (size_t start = 0; start < n; start += piece) {
        measure_span(dtype, raw + start * ITEM_BYTES[dtype], n - start < piece ? n - start : piece, &one);
        merge(out, &one);
    }
    put_back(mode);
}

#include "_native_layout.h"

/* How many of the elements belong to each place of a grid, added to `counts`. */
static void count_contiguous(int dtype, const char *raw, size_t n, const Grid *grid, int64_t *counts)
{
    const FloatMode mode = take_small_numbers();
    count(dtype, raw, n, grid, counts);
    put_back(mode);
}
