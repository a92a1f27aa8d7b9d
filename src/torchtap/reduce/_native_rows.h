/* Where small tensors lie that `_rows.c` is to read beside each other, found in one call. Included by _native.c. */

enum { FLOAT_DTYPES = BFLOAT16 + 1, MOST_ROWS = 5 };

/* 1 where a tensor has this dtype and these sizes and lies in one piece; `address` says where. 0: Python sees to it. */
static int lies_like(PyObject *tensor, int dtype, int dimensions, const int64_t *shape, Py_ssize_t *address)
{
    DLTensor dl;
    Memory memory;
    if (!is_plain(tensor) || !locate(tensor, &memory))
        return 0;
    Py_XDECREF(memory.storage); /* the tensor has it, and nobody runs before it was read */
    if (!memory.contiguous || memory.dtype != dtype || exchange->look(tensor, &dl) != 0 ||
        dl.dimensions != dimensions)
        return 0;
    for (int i = 0; i < dimensions; i++)
        if (dl.shape[i] != shape[i])
            return 0;
    *address = (Py_ssize_t)memory.raw;
    return 1;
}

/* rows_of(ends, value, ...): (dtype, rows, width, address, ...) of floats of the same sizes, the last `ends` of which are
 * one row each. None where one of them is anything else, or so large that the interpreter is let go of meanwhile. */
static PyObject *py_rows_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    DLTensor dl;
    Py_ssize_t found[3 + MOST_ROWS];
    const Py_ssize_t ends = nargs < 2 ? -1 : PyLong_AsSsize_t(args[0]);
    (void)self;
    if (ends < 0 || ends > nargs - 2 || nargs > 1 + MOST_ROWS) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "expected a number and two to five tensors");
        return NULL;
    }
    if (!is_plain(args[1]) || exchange->look(args[1], &dl) != 0 || dl.dimensions < 1)
        goto left_to_python;
    const int dtype = dl_dtype(&dl), dimensions = dl.dimensions;
    int64_t shape[MOST_DIMENSIONS], elements = 1;
    if (dtype < 0 || dtype >= FLOAT_DTYPES || dimensions > MOST_DIMENSIONS)
        goto left_to_python;
    for (int i = 0; i < dimensions; i++)
        elements *= shape[i] = dl.shape[i];
    if (!elements || (size_t)elements * ITEM_BYTES[dtype] >= RELEASE_BYTES)
        goto left_to_python;
    const int64_t width = shape[dimensions - 1];
    for (Py_ssize_t i = 1; i < nargs; i++) {
        const int is_one_row = i >= nargs - ends;
        if (!lies_like(args[i], dtype, is_one_row ? 1 : dimensions, is_one_row ? &width : shape, found + 2 + i))
            goto left_to_python;
    }
    found[0] = dtype;
    found[1] = (Py_ssize_t)(elements / width);
    found[2] = (Py_ssize_t)width;
    PyObject *answer = PyTuple_New(nargs + 2);
    for (Py_ssize_t i = 0; answer && i < nargs + 2; i++) {
        PyObject *number = PyLong_FromSsize_t(found[i]);
        if (!number || PyTuple_SetItem(answer, i, number) < 0)
            Py_CLEAR(answer);
    }
    return answer;
left_to_python:
    PyErr_Clear(); /* whatever it was: Python asks again, and says it */
    Py_RETURN_NONE;
}
