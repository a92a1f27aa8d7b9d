/* The norms of rows of tensors and of their differences, all from one read of the memory.
 *
 * No torch headers: it is handed addresses, counts and a number for the dtype, so that one build serves every torch.
 * Differences of float32 are taken in float32, as torch takes them, and of 16-bit numbers too; squares are added up
 * in lanes over a few hundred elements and from there on in double precision. It guarantees:
 * - squares too small or too large for float32 are added up in double precision instead of vanishing or overflowing;
 * - the interpreter lock is released for rows that take longer than handing it over;
 * - no address is looked at before the caller has vouched for it (row_norms.py): nothing here can check one.
 *
 * Not here: which tensors may be read at all, and the same numbers by torch operations (row_norms.py).
 */

#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_bfloat16.h"

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

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86_CHOICE 1
#include <immintrin.h>
#define HALF_BY_INSTRUCTION 1
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define ISA(x) x##_avx2
#include "_rows_isa.h"
#undef TARGET
#undef ISA
#if defined(__clang__)
#define WIDE_VECTORS ""
#else
#define WIDE_VECTORS ",prefer-vector-width=512"
#endif
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c" WIDE_VECTORS)))
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
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        add_rows = add_rows_avx2;
        instructions = "avx2";
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            add_rows = add_rows_avx512;
            instructions = "avx512";
        }
    }
#endif
}

/* ---- the way in from Python ---- */

/* sums(dtype, rows, width, value, between[, start[, bias, start_bias]]): sums over rows of their norms. Addresses all.
 *
 * Of two:   |value|, |value - between|
 * of three: |value - between|, |between - start|, |value|, |start|
 * of five:  |value - between|, |between - start|, |value - bias|, |start - start_bias|,
 *           |(value - bias) - (between - start_bias)|
 */
static PyObject *py_sums(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t numbers[3 + OPERANDS];
    const char *operands[OPERANDS] = {0};
    double sums[MOST_NORMS] = {0};
    (void)self;
    if (nargs != 5 && nargs != 6 && nargs != 8) {
        PyErr_Format(PyExc_TypeError, "expected 5, 6 or 8 arguments, got %zd", nargs);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        numbers[i] = PyLong_AsSsize_t(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return NULL;
        if (i >= 3)
            operands[i - 3] = (const char *)numbers[i];
    }
    const Py_ssize_t dtype = numbers[0];
    if (dtype < 0 || dtype >= DTYPES) {
        PyErr_Format(PyExc_ValueError, "there is no dtype number %zd", dtype);
        return NULL;
    }
    const size_t rows = (size_t)numbers[1], width = (size_t)numbers[2];
    if (rows * width * ITEM_BYTES[dtype] < RELEASE_BYTES)
        add_rows((int)dtype, rows, width, operands, sums);
    else {
        Py_BEGIN_ALLOW_THREADS
        add_rows((int)dtype, rows, width, operands, sums);
        Py_END_ALLOW_THREADS
    }
    const Py_ssize_t found = nargs == 5 ? 2 : nargs == 6 ? 4 : 5;
    PyObject *answer = PyTuple_New(found);
    for (Py_ssize_t i = 0; answer && i < found; i++) {
        PyObject *sum = PyFloat_FromDouble(sums[i]);
        if (!sum || PyTuple_SetItem(answer, i, sum) < 0)
            Py_CLEAR(answer);
    }
    return answer;
}

/* use_instructions(name): which of the built instruction sets to run, for the tests; returns the one now in use. */
static PyObject *py_use_instructions(PyObject *self, PyObject *name)
{
    (void)self;
    if (PyUnicode_CompareWithASCIIString(name, "plain") == 0) {
        add_rows = add_rows_plain;
        instructions = "plain";
    } else {
        choose_instructions();
#ifdef HAVE_X86_CHOICE
        if (add_rows == add_rows_avx512 && PyUnicode_CompareWithASCIIString(name, "avx2") == 0) {
            add_rows = add_rows_avx2;
            instructions = "avx2";
        }
#endif
    }
    return PyUnicode_FromString(instructions);
}

static PyMethodDef methods[] = {
    {"sums", (PyCFunction)(void (*)(void))py_sums, METH_FASTCALL, NULL},
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
    .m_name = "_rows",
    .m_doc = "Norms of rows of raw memory in one pass; for torchtap.reduce.row_norms alone.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
