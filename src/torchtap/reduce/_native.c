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

#include "_native_kernel.h"

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

static void fold_into(State *row, const State *state)
{
    const FloatMode mode = take_small_numbers();
    merge(row, state);
    put_back(mode);
}

static int known_dtype(Py_ssize_t dtype)
{
    if (dtype >= 0 && dtype < DTYPES)
        return 1;
    PyErr_Format(PyExc_ValueError, "there is no dtype number %zd", dtype);
    return 0;
}

/* Memory as it is handed over: address, count, dtype. What lies there is for the caller to vouch for (memory.py). */
static int known_memory(const Py_ssize_t *memory)
{
    if (!known_dtype(memory[2]))
        return 0;
    if (memory[1] >= 0 && (memory[0] || !memory[1]) && (size_t)memory[0] % ITEM_BYTES[memory[2]] == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "no memory of %zd elements begins at %zd", memory[1], memory[0]);
    return 0;
}

static void measure_released(const Py_ssize_t *memory, Py_ssize_t threads, State *out)
{
    const char *raw = (const char *)memory[0];
    const size_t n = (size_t)memory[1];
    const int dtype = (int)memory[2];
    if (n * ITEM_BYTES[dtype] < RELEASE_BYTES) {
        measure_contiguous(dtype, raw, n, (int)threads, out);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    measure_contiguous(dtype, raw, n, (int)threads, out);
    Py_END_ALLOW_THREADS
}

/* measure(state, memory, count, dtype, threads): the state of contiguous memory, written to `state`. */
static PyObject *py_measure(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[5];
    State found; /* what others may look at is written with the interpreter's lock alone */
    (void)self;
    if (!take_numbers(args, nargs, 5, a) || !known_memory(a + 1))
        return NULL;
    measure_released(a + 1, a[4], &found);
    *(State *)a[0] = found;
    Py_RETURN_NONE;
}

/* fold(row, state): merge `state` into `row`. */
static PyObject *py_fold(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[2];
    (void)self;
    if (!take_numbers(args, nargs, 2, a))
        return NULL;
    fold_into((State *)a[0], (const State *)a[1]);
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
        if (size < 0) {
            PyErr_SetString(PyExc_ValueError, "a size below zero");
            return NULL;
        }
        elements *= (size_t)size;
        if (size != 1) {
            layout.size[layout.dimensions] = (size_t)size;
            layout.stride[layout.dimensions++] = stride;
        }
    }
    const Py_ssize_t memory[3] = {a[1], (Py_ssize_t)elements, a[2]};
    if (!known_memory(memory))
        return NULL;
    const char *raw = (const char *)a[1];
    State found = BLANK;
    if (layout.dimensions == 0)
        measure_contiguous((int)a[2], raw, 1, 1, &found);
    else if (elements * ITEM_BYTES[a[2]] < RELEASE_BYTES) {
        if (elements)
            measure_layout((int)a[2], raw, &layout, 1, &found);
    } else {
        Py_BEGIN_ALLOW_THREADS
        measure_layout((int)a[2], raw, &layout, (int)a[3], &found);
        Py_END_ALLOW_THREADS
    }
    *(State *)a[0] = found;
    Py_RETURN_NONE;
}

/* An array's memory, for as long as it is held; 0 with the error set. */
static int take_array(PyObject *given, int flags, Py_ssize_t item, Py_buffer *array)
{
    if (PyObject_GetBuffer(given, array, flags) < 0)
        return 0;
    if (array->len % item == 0)
        return 1;
    PyBuffer_Release(array);
    PyErr_SetString(PyExc_ValueError, "an array of other items");
    return 0;
}

/* Results of the states that `rows` names, or of all without; 0 where there is no such row, or no room. */
static int finish_states(const Py_buffer *states, const Py_buffer *rows, Py_buffer *results)
{
    const Py_ssize_t known = states->len / (Py_ssize_t)sizeof(State);
    const Py_ssize_t wanted = rows ? rows->len / (Py_ssize_t)sizeof(Py_ssize_t) : known;
    if (results->len != wanted * STATISTICS * (Py_ssize_t)sizeof(double))
        return 0;
    for (Py_ssize_t i = 0; i < wanted; i++) {
        const Py_ssize_t row = rows ? ((const Py_ssize_t *)rows->buf)[i] : i;
        if (row < 0 || row >= known)
            return 0;
        finish_state((const State *)states->buf + row, (double *)results->buf + i * STATISTICS);
    }
    return 1;
}

/* finish_rows(states, rows, results): the twelve statistics of these rows, as moments.finish has them; rows None: of all. */
static PyObject *py_finish(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer states, rows, results;
    const int chosen = nargs == 3 && args[1] != Py_None;
    (void)self;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "expected states, rows and room for results");
        return NULL;
    }
    if (!take_array(args[0], PyBUF_SIMPLE, sizeof(State), &states))
        return NULL;
    if (chosen && !take_array(args[1], PyBUF_SIMPLE, sizeof(Py_ssize_t), &rows)) {
        PyBuffer_Release(&states);
        return NULL;
    }
    int done = 0;
    if (take_array(args[2], PyBUF_WRITABLE, sizeof(double), &results)) {
        const FloatMode mode = take_small_numbers();
        done = finish_states(&states, chosen ? &rows : NULL, &results);
        put_back(mode);
        PyBuffer_Release(&results);
        if (!done)
            PyErr_SetString(PyExc_IndexError, "there is no such row, or no room for its results");
    }
    if (chosen)
        PyBuffer_Release(&rows);
    PyBuffer_Release(&states);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

/* blank_rows(states): nothing was seen. */
static PyObject *py_blank(PyObject *self, PyObject *given)
{
    Py_buffer states;
    (void)self;
    if (!take_array(given, PyBUF_WRITABLE, sizeof(State), &states))
        return NULL;
    for (Py_ssize_t i = 0; i < states.len / (Py_ssize_t)sizeof(State); i++)
        ((State *)states.buf)[i] = BLANK;
    PyBuffer_Release(&states);
    Py_RETURN_NONE;
}

/* count(counts, memory, count, dtype, edges, bins, low, high, bits): counts in bins of contiguous memory, added. */
static PyObject *py_count(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[9];
    (void)self;
    if (!take_numbers(args, nargs, 9, a) || !known_memory(a + 1))
        return NULL;
    const Grid grid = {(const double *)a[4], a[5], a[6], a[7], a[8]};
    if ((size_t)a[2] * ITEM_BYTES[a[3]] < RELEASE_BYTES)
        count_contiguous((int)a[3], (const char *)a[1], (size_t)a[2], &grid, (int64_t *)a[0]);
    else {
        Py_BEGIN_ALLOW_THREADS
        count_contiguous((int)a[3], (const char *)a[1], (size_t)a[2], &grid, (int64_t *)a[0]);
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

/* use_pool(address): let this function run pieces in its threads; 0 for threads of our own. */
static PyObject *py_use_pool(PyObject *self, PyObject *address)
{
    const Py_ssize_t given = PyLong_AsSsize_t(address);
    (void)self;
    if (given == -1 && PyErr_Occurred())
        return NULL;
#ifdef HAVE_THREADS
    pool = (Pool)given;
#endif
    Py_RETURN_NONE;
}

#include "_native_tensor.h"
#include "_native_taking.h"

static PyMethodDef methods[] = {
    {"measure", (PyCFunction)(void (*)(void))py_measure, METH_FASTCALL, NULL},
    {"measure_strided", (PyCFunction)(void (*)(void))py_measure_strided, METH_FASTCALL, NULL},
    {"count", (PyCFunction)(void (*)(void))py_count, METH_FASTCALL, NULL},
    {"finish_rows", (PyCFunction)(void (*)(void))py_finish, METH_FASTCALL, NULL},
    {"blank_rows", py_blank, METH_O, NULL},
    {"fold", (PyCFunction)(void (*)(void))py_fold, METH_FASTCALL, NULL},
    {"use_pool", py_use_pool, METH_O, NULL},
    {"is_sound", py_is_sound, METH_O, NULL},
    {"use_tensors", (PyCFunction)(void (*)(void))py_use_tensors, METH_FASTCALL, NULL},
    {"use_instructions", py_use_instructions, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    choose_instructions();
    if (!name_questions() || add_taker(module) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "FIELDS", sizeof(State) / sizeof(double));
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
