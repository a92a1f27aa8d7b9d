/* All statistics of a tensor from one read of its memory.
 *
 * No torch headers: it is handed addresses, counts and a number for the dtype, so that one build serves every torch.
 * Memory is read in blocks that stay in the cache (_native_block.h); blocks are merged in double precision, by the
 * formula of Chan, Golub and LeVeque. It guarantees:
 * - the answer does not depend on the number of threads: pieces have a fixed size and merge in their order;
 * - the interpreter lock is released for tensors that take longer than handing it over;
 * - no address is looked at before the caller has vouched for it (kernel.py): nothing here can check one.
 *
 * Not here: which tensors may be read at all (kernel.py), what follows from a state (moments.py).
 */

#include <Python.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if !defined(_WIN32)
#include <pthread.h>
#define HAVE_THREADS 1
#endif

#include "_bfloat16.h"

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, UINT8, INT16, INT32, INT64, BOOL, DTYPES };
static const size_t ITEM_BYTES[DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};

#define BLOCK 8192         /* elements of up to four bytes: 32 KiB, which the second-level cache surely holds */
#define PIECE_BLOCKS 32    /* what a thread takes at a time */
#define MOST_THREADS 64    /* memory is saturated long before */
#define MOST_DIMENSIONS 64 /* as in torch */
/* Below this, handing the interpreter over and waiting to get it back costs more than the work. */
#define RELEASE_BYTES (1 << 20)

/* The same fields in the same order as moments.FIELDS. */
typedef struct {
    double count, nans, infs, zeros, mean, squares, low, high, l1;
} State;

static const State BLANK = {0, 0, 0, 0, 0, 0, INFINITY, -INFINITY, 0};

/* Bins: equal ones between `edges`, or, without, those of octaves.py: 2**bits to each power of two. */
typedef struct {
    const double *edges;
    Py_ssize_t bins, low, high, bits;
} Grid;

static void merge(State *into, const State *from)
{
    const double before = into->count - into->nans - into->infs;
    const double more = from->count - from->nans - from->infs;
    into->count += from->count;
    into->nans += from->nans;
    into->infs += from->infs;
    into->zeros += from->zeros;
    into->l1 += from->l1;
    if (more == 0)
        return;
    if (before == 0) {
        into->mean = from->mean;
        into->squares = from->squares;
        into->low = from->low;
        into->high = from->high;
        return;
    }
    const double share = more / (before + more);
    const double delta = from->mean - into->mean;
    if (delta - delta == 0)
        into->mean += delta * share;
    else /* two means at opposite ends of the range: their distance overflows, their average does not */
        into->mean = into->mean * (1 - share) + from->mean * share;
    into->squares += from->squares + delta * delta * (before * share);
    if (from->low < into->low)
        into->low = from->low;
    if (from->high > into->high)
        into->high = from->high;
}

/* A center near `mean`, in steps of about the spread. Its low digits would be rounded away in the same
 * direction whenever it is taken from a larger number, and that would add up; so it has none. */
static double blunt(double mean, double spread)
{
    int exponent;
    if (!(spread > 0 && spread - spread == 0))
        return mean;
    frexp(spread, &exponent);
    const double step = ldexp(1, exponent - 1), steps = mean / step;
    return fabs(steps) < 0x1p52 ? floor(steps + 0.5) * step : mean;
}

static double center_of(const State *state)
{
    return blunt(state->mean, sqrt(state->squares / (state->count - state->nans - state->infs)));
}

typedef void (*BlockFunction)(int, const char *, size_t, State *, const State *);
typedef void (*CountFunction)(int, const char *, size_t, const Grid *, int64_t *);

#define TARGET
#define ISA(x) x##_plain
#include "_native_isa.h"
#undef TARGET
#undef ISA

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86_CHOICE 1
#include <immintrin.h>
#define HALF_BY_INSTRUCTION 1
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define ISA(x) x##_avx2
#include "_native_isa.h"
#undef TARGET
#undef ISA
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c" WIDE_VECTORS)))
#if defined(__clang__)
#define WIDE_VECTORS ""
#else
#define WIDE_VECTORS ",prefer-vector-width=512"
#endif
#define ISA(x) x##_avx512
#include "_native_isa.h"
#undef TARGET
#undef ISA
#endif

static BlockFunction block = block_plain;
static CountFunction count = count_plain;
static const char *instructions = "plain";

static void choose_instructions(void)
{
#ifdef HAVE_X86_CHOICE
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        block = block_avx2;
        count = count_avx2;
        instructions = "avx2";
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            block = block_avx512;
            count = count_avx512;
            instructions = "avx512";
        }
    }
#endif
}

static size_t block_length(int dtype)
{
    return dtype == FLOAT32 || dtype == BFLOAT16 ? BLOCK : dtype == INT32 || dtype == INT64 ? BLOCK / 4 : BLOCK / 2;
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
        before = one.count > one.nans + one.infs ? &one : NULL;
        raw += now * bytes;
        n -= now;
    }
}

typedef struct {
    int dtype;
    const char *raw;
    size_t n, piece, pieces, next;
    State *states;
} Work;

static void *take_pieces(void *given)
{
    Work *work = given;
    for (;;) {
#ifdef HAVE_THREADS
        const size_t index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
#else
        const size_t index = work->next++;
#endif
        if (index >= work->pieces)
            return NULL;
        const size_t start = index * work->piece, left = work->n - start;
        measure_span(work->dtype, work->raw + start * ITEM_BYTES[work->dtype],
                     left < work->piece ? left : work->piece, work->states + index);
    }
}

static void measure_contiguous(int dtype, const char *raw, size_t n, int threads, State *out)
{
    const size_t piece = PIECE_BLOCKS * block_length(dtype);
    const size_t pieces = (n + piece - 1) / piece;
#ifdef HAVE_THREADS
    if (threads > 1 && pieces > 1) {
        Work work = {dtype, raw, n, piece, pieces, 0, malloc(pieces * sizeof(State))};
        if (work.states) {
            pthread_t others[MOST_THREADS];
            int started = 0;
            if (threads > MOST_THREADS)
                threads = MOST_THREADS;
            if ((size_t)threads > pieces)
                threads = (int)pieces;
            /* A thread that cannot be started leaves its pieces to the others. */
            while (started < threads - 1 && pthread_create(others + started, NULL, take_pieces, &work) == 0)
                started++;
            take_pieces(&work);
            for (int i = 0; i < started; i++)
                pthread_join(others[i], NULL);
            *out = BLANK;
            for (size_t i = 0; i < pieces; i++)
                merge(out, work.states + i);
            free(work.states);
            return;
        }
    }
#endif
    State one;
    *out = BLANK;
    for (size_t start = 0; start < n; start += piece) {
        measure_span(dtype, raw + start * ITEM_BYTES[dtype], n - start < piece ? n - start : piece, &one);
        merge(out, &one);
    }
}

#include "_native_layout.h"

/* ---- the way in from Python ---- */

static int take_numbers(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted, Py_ssize_t *numbers)
{
    if (nargs != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, nargs);
        return 0;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        numbers[i] = PyLong_AsSsize_t(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static int known_dtype(Py_ssize_t dtype)
{
    if (dtype >= 0 && dtype < DTYPES)
        return 1;
    PyErr_Format(PyExc_ValueError, "there is no dtype number %zd", dtype);
    return 0;
}

static void measure_released(int dtype, const char *raw, size_t n, int threads, State *out)
{
    if (n * ITEM_BYTES[dtype] < RELEASE_BYTES) {
        measure_contiguous(dtype, raw, n, 1, out);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    measure_contiguous(dtype, raw, n, threads, out);
    Py_END_ALLOW_THREADS
}

/* measure(state, memory, count, dtype, threads): the state of contiguous memory, written to `state`. */
static PyObject *py_measure(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[5];
    (void)self;
    if (!take_numbers(args, nargs, 5, a) || !known_dtype(a[3]))
        return NULL;
    measure_released((int)a[3], (const char *)a[1], (size_t)a[2], (int)a[4], (State *)a[0]);
    Py_RETURN_NONE;
}

/* measure_fold(row, state, memory, count, dtype, threads): measure, then fold the state into `row`. */
static PyObject *py_measure_fold(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[6];
    (void)self;
    if (!take_numbers(args, nargs, 6, a) || !known_dtype(a[4]))
        return NULL;
    measure_released((int)a[4], (const char *)a[2], (size_t)a[3], (int)a[5], (State *)a[1]);
    merge((State *)a[0], (const State *)a[1]);
    Py_RETURN_NONE;
}

/* fold(row, state): merge `state` into `row`. */
static PyObject *py_fold(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[2];
    (void)self;
    if (!take_numbers(args, nargs, 2, a))
        return NULL;
    merge((State *)a[0], (const State *)a[1]);
    Py_RETURN_NONE;
}

/* measure_strided(state, memory, dtype, threads, shape, strides): as measure, of a layout in elements. */
static PyObject *py_measure_strided(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[4];
    Layout layout = {0};
    size_t elements = 1;
    (void)self;
    if (nargs != 6 || !PyTuple_Check(args[4]) || !PyTuple_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "expected four numbers and two tuples");
        return NULL;
    }
    if (!take_numbers(args, 4, 4, a) || !known_dtype(a[2]))
        return NULL;
    const Py_ssize_t dimensions = PyTuple_Size(args[4]);
    if (dimensions != PyTuple_Size(args[5]) || dimensions > MOST_DIMENSIONS) {
        PyErr_SetString(PyExc_ValueError, "shape and strides differ in length, or have too many dimensions");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < dimensions; i++) {
        const Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GetItem(args[4], i));
        const Py_ssize_t stride = PyLong_AsSsize_t(PyTuple_GetItem(args[5], i));
        if (PyErr_Occurred())
            return NULL;
        elements *= (size_t)size;
        if (size != 1) {
            layout.size[layout.dimensions] = (size_t)size;
            layout.stride[layout.dimensions++] = stride;
        }
    }
    State *out = (State *)a[0];
    const char *raw = (const char *)a[1];
    if (elements == 0)
        *out = BLANK;
    else if (layout.dimensions == 0)
        measure_contiguous((int)a[2], raw, 1, 1, out);
    else if (elements * ITEM_BYTES[a[2]] < RELEASE_BYTES)
        measure_layout((int)a[2], raw, &layout, 1, out);
    else {
        Py_BEGIN_ALLOW_THREADS
        measure_layout((int)a[2], raw, &layout, (int)a[3], out);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* count(counts, memory, count, dtype, edges, bins, low, high, bits): counts in bins of contiguous memory, added. */
static PyObject *py_count(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[9];
    (void)self;
    if (!take_numbers(args, nargs, 9, a) || !known_dtype(a[3]))
        return NULL;
    const Grid grid = {(const double *)a[4], a[5], a[6], a[7], a[8]};
    if ((size_t)a[2] * ITEM_BYTES[a[3]] < RELEASE_BYTES)
        count((int)a[3], (const char *)a[1], (size_t)a[2], &grid, (int64_t *)a[0]);
    else {
        Py_BEGIN_ALLOW_THREADS
        count((int)a[3], (const char *)a[1], (size_t)a[2], &grid, (int64_t *)a[0]);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* use_instructions(name): which of the built instruction sets to run, for the tests; returns the one now in use. */
static PyObject *py_use_instructions(PyObject *self, PyObject *name)
{
    (void)self;
    if (PyUnicode_CompareWithASCIIString(name, "plain") == 0) {
        block = block_plain;
        count = count_plain;
        instructions = "plain";
    } else {
        choose_instructions();
#ifdef HAVE_X86_CHOICE
        if (block == block_avx512 && PyUnicode_CompareWithASCIIString(name, "avx2") == 0) {
            block = block_avx2;
            count = count_avx2;
            instructions = "avx2";
        }
#endif
    }
    return PyUnicode_FromString(instructions);
}

static PyMethodDef methods[] = {
    {"measure", (PyCFunction)(void (*)(void))py_measure, METH_FASTCALL, NULL},
    {"measure_fold", (PyCFunction)(void (*)(void))py_measure_fold, METH_FASTCALL, NULL},
    {"measure_strided", (PyCFunction)(void (*)(void))py_measure_strided, METH_FASTCALL, NULL},
    {"count", (PyCFunction)(void (*)(void))py_count, METH_FASTCALL, NULL},
    {"fold", (PyCFunction)(void (*)(void))py_fold, METH_FASTCALL, NULL},
    {"use_instructions", py_use_instructions, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    (void)module;
    choose_instructions();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "All statistics of raw memory in one pass; for torchtap.reduce.kernel alone.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
