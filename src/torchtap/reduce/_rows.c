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

#include "_rows_kernel.h"

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
    for (Py_ssize_t i = 3; i < nargs; i++)
        if (numbers[1] < 0 || numbers[2] < 0 || (size_t)numbers[i] % ITEM_BYTES[dtype] ||
            (!numbers[i] && numbers[1] && numbers[2])) {
            PyErr_Format(PyExc_ValueError, "no %zd rows of %zd begin at %zd", numbers[1], numbers[2], numbers[i]);
            return NULL;
        }
    const size_t rows = (size_t)numbers[1], width = (size_t)numbers[2];
    if (rows * width * ITEM_BYTES[dtype] < RELEASE_BYTES)
        sum_rows((int)dtype, rows, width, operands, sums);
    else {
        Py_BEGIN_ALLOW_THREADS
        sum_rows((int)dtype, rows, width, operands, sums);
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
    choose_instructions();
    (void)module;
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
