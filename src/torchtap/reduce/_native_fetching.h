/* Memory brought into the cache before something reads it in an order that would wait for it. Included by _native.c. */

enum { CACHE_LINE = 64, STREAMS = 4 };

/* One byte of each line. Several places at a time: the memory answers more than one question at once. */
static void touch(const char *memory, size_t bytes)
{
    const size_t part = bytes / STREAMS;
    volatile char seen;
    for (size_t at = 0; at < part; at += CACHE_LINE)
        for (size_t stream = 0; stream < STREAMS; stream++)
            seen = memory[stream * part + at];
    (void)seen;
}

/* fetch(tensor, least, most): read a contiguous tensor of so many bytes; says whether it was. */
static PyObject *py_fetch(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t bounds[2];
    Memory memory;
    (void)self;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "expected a tensor and two numbers");
        return NULL;
    }
    if (!take_numbers(args + 1, 2, 2, bounds))
        return NULL;
    if (!is_plain(args[0]) || !locate(args[0], &memory)) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    const size_t bytes = memory.elements * ITEM_BYTES[memory.dtype];
    const int wanted = memory.contiguous && bytes && bounds[0] >= 0 && bytes >= (size_t)bounds[0] &&
                       bounds[1] >= 0 && bytes <= (size_t)bounds[1];
    if (wanted)
        touch(memory.raw, bytes);
    Py_XDECREF(memory.storage);
    return PyBool_FromLong(wanted);
}
