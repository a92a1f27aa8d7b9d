/* Rows that take tensors as they are: from a Python tensor to its memory, its state and a row, in one call.
 *
 * One of the last few tensors that is shown again is folded, not read. Between that look and the fold the interpreter's
 * lock is held, so small values need no other. Included by _native.c. */

typedef struct {
    PyObject_HEAD State *rows;
    Py_ssize_t count, most;
    Marks recent;
    State states[RECENT]; /* of the tensors that are marked */
} Taker;

static PyTypeObject *taker_type;

static void measure_memory(Memory *memory, int threads, State *out)
{
    if (memory->contiguous || !memory->elements)
        measure_contiguous(memory->dtype, memory->raw, memory->elements, threads, out);
    else
        measure_layout(memory->dtype, memory->raw, &memory->layout, threads, out);
}

/* Lets go of the interpreter where that is worth it. Values of at most so many elements are for one thread; 0 `threads`: only
 * what is small, without letting go. Says whether it was measured; its storage is held no longer. */
static int measure_located(Memory *memory, Py_ssize_t for_one, int threads, State *out)
{
    const int alone = memory->elements <= (size_t)for_one;
    const int small = alone && memory->elements * ITEM_BYTES[memory->dtype] < RELEASE_BYTES;
    if (small) {
        measure_memory(memory, 1, out);
    } else if (threads) {
        Py_BEGIN_ALLOW_THREADS
        measure_memory(memory, alone ? 1 : threads, out);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(memory->storage);
    return small || threads;
}

/* 1 measured and folded, 0 left to Python, -1 with an error. `threads` 0: only what is small, without letting go.
 * `anew`: replace what is in the row. */
static int take_into_row(Taker *self, Py_ssize_t row, PyObject *tensor, int threads, int anew)
{
    Memory memory;
    State found;
    if (row < 0 || row >= self->count) {
        PyErr_Format(PyExc_IndexError, "there is no row %zd", row);
        return -1;
    }
    if (!is_plain(tensor))
        return 0;
    const long long version = version_of(tensor);
    int place = find_mark(&self->recent, tensor, version);
    if (place >= 0) {
        if (anew)
            self->rows[row] = BLANK;
        fold_into(self->rows + row, self->states + place);
        return 1;
    }
    if (PyErr_Occurred() || !locate(tensor, &memory)) {
        PyErr_Clear(); /* whatever it was: Python asks again, and says it */
        return 0;
    }
    if (!measure_located(&memory, self->most, threads, &found) ||
        row >= self->count) /* the rows may have moved meanwhile, but there are never fewer */
        return 0;
    if (anew)
        self->rows[row] = BLANK;
    fold_into(self->rows + row, &found);
    place = set_mark(&self->recent, tensor, version);
    if (place >= 0)
        self->states[place] = found;
    return 1;
}

static int take_value(Taker *self, PyObject *row_number, PyObject *tensor, int threads, int anew)
{
    const Py_ssize_t row = PyLong_AsSsize_t(row_number);
    if (row == -1 && PyErr_Occurred())
        return -1;
    return take_into_row(self, row, tensor, threads, anew);
}

static PyObject *answer(int taken)
{
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

/* take(row, tensor): measure a small value, or fold it if it was just measured. False: nothing was done. */
static PyObject *taker_take(Taker *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a row and a tensor");
        return NULL;
    }
    return answer(take_value(self, args[0], args[1], 0, 0));
}

/* put_each(rows, tensors): `take` each tensor in place of what was in its row. Returns the positions of those for which
 * nothing was done. */
static PyObject *taker_put_each(Taker *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || PyList_Size(args[0]) != PyList_Size(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a list of rows and a list of as many tensors");
        return NULL;
    }
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < PyList_Size(args[0]) && i < PyList_Size(args[1]); i++) {
        PyObject *row = PyList_GetItem(args[0], i), *tensor = PyList_GetItem(args[1], i);
        Py_INCREF(row); /* the lists are the caller's, who may change them meanwhile */
        Py_INCREF(tensor);
        const int taken = take_value(self, row, tensor, 0, 1);
        Py_DECREF(row);
        Py_DECREF(tensor);
        PyObject *position = taken ? NULL : PyLong_FromSsize_t(i);
        if (taken < 0 || (!taken && (!position || PyList_Append(left, position) < 0)))
            Py_CLEAR(left);
        Py_XDECREF(position);
    }
    return left;
}

/* take_any(row, tensor, threads): the same of any size. Lets go of the interpreter for large ones: the caller brings a
 * lock, so that nobody empties the rows meanwhile. */
static PyObject *taker_take_any(Taker *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Py_ssize_t threads = nargs == 3 ? PyLong_AsSsize_t(args[2]) : 0;
    if (threads < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "expected a row, a tensor and a number of threads");
        return NULL;
    }
    return answer(take_value(self, args[0], args[1], (int)threads, 0));
}

/* use_rows(address, count): where the rows are. Whoever owns the memory keeps it until it names another. */
static PyObject *taker_use_rows(Taker *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t a[2];
    if (!take_numbers(args, nargs, 2, a))
        return NULL;
    self->rows = (State *)a[0];
    self->count = a[0] ? a[1] : 0;
    Py_RETURN_NONE;
}

/* forget(): no tensor was seen. */
static PyObject *taker_forget(Taker *self, PyObject *unused)
{
    (void)unused;
    forget_marks(&self->recent);
    Py_RETURN_NONE;
}

/* Taker(most): values of more elements than this are not small. */
static PyObject *taker_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    Py_ssize_t most;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "n", &most))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Taker *self = (Taker *)make(type, 0);
    if (self) {
        self->most = most;
        forget_marks(&self->recent);
    }
    return (PyObject *)self;
}

static void taker_free(Taker *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    forget_marks(&self->recent);
    freefunc let_go = (freefunc)PyType_GetSlot(type, Py_tp_free);
    let_go(self);
    Py_DECREF(type);
}

static PyMethodDef taker_methods[] = {
    {"take", (PyCFunction)(void (*)(void))taker_take, METH_FASTCALL, NULL},
    {"put_each", (PyCFunction)(void (*)(void))taker_put_each, METH_FASTCALL, NULL},
    {"take_any", (PyCFunction)(void (*)(void))taker_take_any, METH_FASTCALL, NULL},
    {"use_rows", (PyCFunction)(void (*)(void))taker_use_rows, METH_FASTCALL, NULL},
    {"forget", (PyCFunction)taker_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot taker_slots[] = {
    {Py_tp_new, (void *)taker_new},
    {Py_tp_dealloc, (void *)taker_free},
    {Py_tp_methods, taker_methods},
    {Py_tp_doc, "Rows that take tensors; for torchtap.reduce.stats alone."},
    {0, NULL},
};

static PyType_Spec taker_spec = {
    .name = "torchtap.reduce._native.Taker",
    .basicsize = sizeof(Taker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = taker_slots,
};

static int add_taker(PyObject *module)
{
    taker_type = (PyTypeObject *)PyType_FromSpec(&taker_spec);
    return taker_type ? PyModule_AddObjectRef(module, "Taker", (PyObject *)taker_type) : -1;
}
