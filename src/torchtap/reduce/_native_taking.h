/* Rows that take tensors as they are: from a Python tensor to its memory, its state and a row, in one call.
 *
 * A tensor tells its address, sizes and strides through DLPack's exchange interface: function pointers of a fixed layout
 * that torch hands out, so that still no header of torch is needed. What `memory.located` vouches for is asked here,
 * question by question; a tensor that fails one is left to Python (False), and nothing of it was read.
 *
 * The last few tensors are remembered by identity and version, not held: one that is shown again is folded, not read.
 * Between that look and the fold the interpreter's lock is held, so small values need no other. Included by _native.c. */

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t dimensions;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* in elements; no strides: contiguous */
    uint64_t offset;          /* in bytes */
} DLTensor;

typedef struct Exchange {
    struct {
        uint32_t major, minor;
    } version;
    struct Exchange *older;
    void *allocate, *own, *make;
    int (*look)(void *, DLTensor *); /* borrows */
    void *stream;
} Exchange;

enum { ON_CPU = 1, DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

#define RECENT 4
#define PLAIN 4 /* the types of tensors that are what they seem */

typedef struct {
    PyObject *tensor; /* only an identity: it may be gone */
    PyObject *reference;
    long long version; /* below zero: nothing is remembered */
    State state;
} Seen;

typedef struct {
    PyObject_HEAD State *rows;
    Py_ssize_t count, most;
    int next;
    Seen recent[RECENT];
} Taker;

/* What is the same for all of them, set once by `use_tensors`. */
static const Exchange *exchange = NULL;
static PyObject *plain_types[PLAIN];
static PyObject *name_is_inference, *name_version, *name_is_neg, *name_storage, *name_nbytes, *name_data_ptr;

static int dl_dtype(const DLTensor *dl)
{
    const int bits = dl->dtype.bits;
    if (dl->dtype.lanes != 1)
        return -1;
    switch (dl->dtype.code) {
    case DL_FLOAT:
        return bits == 32 ? FLOAT32 : bits == 64 ? FLOAT64 : bits == 16 ? FLOAT16 : -1;
    case DL_BFLOAT:
        return bits == 16 ? BFLOAT16 : -1;
    case DL_INT:
        return bits == 64 ? INT64 : bits == 32 ? INT32 : bits == 16 ? INT16 : bits == 8 ? INT8 : -1;
    case DL_UINT:
        return bits == 8 ? UINT8 : -1;
    case DL_BOOL:
        return bits == 8 ? BOOL : -1;
    default:
        return -1;
    }
}

/* A number that a method of no arguments answers with; -1 where it raised, with the error set. */
static long long ask_number(PyObject *of, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodObjArgs(of, method, NULL);
    if (!answer)
        return -1;
    const long long number = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return number;
}

/* 1, 0, or -1 with the error set. */
static int ask_whether(PyObject *of, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodObjArgs(of, method, NULL);
    if (!answer)
        return -1;
    const int is_true = answer == Py_True;
    Py_DECREF(answer);
    return is_true;
}

/* How often a tensor was changed in place; -1 where nothing tells (inference tensors keep no version). */
static long long version_of(PyObject *tensor)
{
    if (ask_whether(tensor, name_is_inference) != 0)
        return -1;
    PyObject *version = PyObject_GetAttr(tensor, name_version);
    if (!version)
        return -1;
    const long long number = PyLong_AsLongLong(version);
    Py_DECREF(version);
    return number;
}

/* What was measured of this very tensor, if it was not changed since. */
static Seen *find_recent(Taker *self, PyObject *tensor, long long version)
{
    for (int i = 0; i < RECENT; i++) {
        Seen *seen = self->recent + i;
        if (seen->tensor != tensor || seen->version != version || version < 0)
            continue;
        PyObject *alive = PyObject_CallNoArgs(seen->reference);
        Py_XDECREF(alive); /* the caller holds it too */
        if (alive == tensor)
            return seen;
        PyErr_Clear();
    }
    return NULL;
}

/* Remember a state. Without a version, or where it cannot be referred to, there is nothing to recognise it by. */
static void remember(Taker *self, PyObject *tensor, long long version, const State *state)
{
    if (version < 0)
        return;
    PyObject *reference = PyWeakref_NewRef(tensor, NULL);
    if (!reference) {
        PyErr_Clear();
        return;
    }
    Seen *seen = self->recent + self->next;
    for (int i = 0; i < RECENT; i++)
        if (self->recent[i].tensor == tensor)
            seen = self->recent + i;
    if (seen == self->recent + self->next)
        self->next = (self->next + 1) % RECENT;
    PyObject *before = seen->reference;
    seen->tensor = tensor;
    seen->reference = reference;
    seen->version = version;
    seen->state = *state;
    Py_XDECREF(before);
}

/* What a value's memory is: contiguous, or a layout to gather by. */
typedef struct {
    const char *raw;
    size_t elements;
    int dtype, contiguous;
    Layout layout;
    PyObject *storage; /* held while the memory is read */
} Memory;

/* Sizes and strides into a layout; answers with the distance from the first element to behind the last, -1 if unknown. */
static Py_ssize_t take_layout(const DLTensor *dl, Memory *memory)
{
    int64_t reach = 1, expected = 1;
    memory->elements = 1;
    memory->contiguous = 1;
    memory->layout.dimensions = 0;
    if (dl->dimensions > MOST_DIMENSIONS)
        return -1;
    for (int i = 0; i < dl->dimensions; i++)
        memory->elements *= (size_t)dl->shape[i];
    if (!memory->elements)
        return 0;
    for (int i = dl->dimensions - 1; i >= 0; i--) {
        const int64_t size = dl->shape[i], stride = dl->strides ? dl->strides[i] : expected;
        if (size == 1)
            continue;
        if (stride < 0)
            return -1;
        memory->contiguous &= stride == expected;
        expected *= size;
        reach += (size - 1) * stride;
        memory->layout.size[memory->layout.dimensions] = (size_t)size;
        memory->layout.stride[memory->layout.dimensions++] = (ptrdiff_t)stride;
    }
    return (Py_ssize_t)reach;
}

/* Whether the storage is there and reaches as far as sizes and strides say. FSDP frees one by giving it no size. */
static int storage_reaches(PyObject *tensor, Memory *memory, size_t bytes)
{
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, name_storage, NULL);
    if (!storage)
        return 0;
    const long long begin = ask_number(storage, name_data_ptr), size = ask_number(storage, name_nbytes);
    const long long at = (long long)(intptr_t)memory->raw;
    if (begin <= 0 || size < 0 || at < begin || (size_t)(at - begin) + bytes > (size_t)size) {
        Py_DECREF(storage);
        return 0;
    }
    memory->storage = storage;
    return 1;
}

/* 1 where this tensor's memory may be read by `memory`, 0 where Python has to see to it. May let go of the lock. */
static int locate(PyObject *tensor, Memory *memory)
{
    DLTensor dl;
    memory->storage = NULL;
    if (ask_whether(tensor, name_is_neg) != 0 || exchange->look(tensor, &dl) != 0)
        return 0;
    if (dl.device.type != ON_CPU || (memory->dtype = dl_dtype(&dl)) < 0)
        return 0;
    const Py_ssize_t reach = take_layout(&dl, memory);
    if (reach < 0)
        return 0;
    memory->raw = (const char *)dl.data + dl.offset;
    if (!reach)
        return 1;
    const size_t item = ITEM_BYTES[memory->dtype];
    return (uintptr_t)memory->raw % item == 0 && storage_reaches(tensor, memory, (size_t)reach * item);
}

static void measure_memory(Memory *memory, int threads, State *out)
{
    if (memory->contiguous || !memory->elements)
        measure_contiguous(memory->dtype, memory->raw, memory->elements, threads, out);
    else
        measure_layout(memory->dtype, memory->raw, &memory->layout, threads, out);
}

static int is_plain(PyObject *tensor)
{
    for (int i = 0; i < PLAIN; i++)
        if ((PyObject *)Py_TYPE(tensor) == plain_types[i])
            return exchange != NULL;
    return 0;
}

/* 1 measured and folded, 0 left to Python, -1 with an error. `threads` 0: only what is small, without letting go.
 * `anew`: in place of what was in the row. */
static int take_value(Taker *self, PyObject *row_number, PyObject *tensor, int threads, int anew)
{
    Memory memory;
    State found;
    const Py_ssize_t row = PyLong_AsSsize_t(row_number);
    if (row < 0 || row >= self->count) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_IndexError, "there is no row %zd", row);
        return -1;
    }
    if (!is_plain(tensor))
        return 0;
    const long long version = version_of(tensor);
    Seen *seen = find_recent(self, tensor, version);
    if (seen) {
        if (anew)
            self->rows[row] = BLANK;
        fold_into(self->rows + row, &seen->state);
        return 1;
    }
    if (PyErr_Occurred() || !locate(tensor, &memory)) {
        PyErr_Clear(); /* whatever it was: Python asks again, and says it */
        return 0;
    }
    const size_t bytes = memory.elements * ITEM_BYTES[memory.dtype];
    const int small = bytes < RELEASE_BYTES && memory.elements <= (size_t)self->most;
    if (small) {
        measure_memory(&memory, 1, &found);
    } else if (threads) {
        Py_BEGIN_ALLOW_THREADS
        measure_memory(&memory, memory.elements <= (size_t)self->most ? 1 : threads, &found);
        Py_END_ALLOW_THREADS
    } else {
        Py_XDECREF(memory.storage);
        return 0;
    }
    Py_XDECREF(memory.storage);
    if (row >= self->count) /* the rows may have moved meanwhile, but there are never fewer */
        return 0;
    if (anew)
        self->rows[row] = BLANK;
    fold_into(self->rows + row, &found);
    remember(self, tensor, version, &found);
    return 1;
}

/* is_sound(tensor): whether it is plain memory on the host, all of it there. */
static PyObject *py_is_sound(PyObject *self, PyObject *tensor)
{
    Memory memory;
    (void)self;
    if (!is_plain(tensor) || !locate(tensor, &memory)) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    Py_XDECREF(memory.storage);
    Py_RETURN_TRUE;
}

static void forget_all(Taker *self)
{
    for (int i = 0; i < RECENT; i++) {
        PyObject *before = self->recent[i].reference;
        self->recent[i].reference = NULL;
        self->recent[i].tensor = NULL;
        self->recent[i].version = -1;
        Py_XDECREF(before);
    }
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

/* put(row, tensor): the same, in place of what was in the row. */
static PyObject *taker_put(Taker *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a row and a tensor");
        return NULL;
    }
    return answer(take_value(self, args[0], args[1], 0, 1));
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

/* take_all(rows, tensors): `take` for the tensors of a list, each into its row; the positions of those left to Python. */
static PyObject *taker_take_all(Taker *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]) ||
        PyList_Size(args[0]) != PyList_Size(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two lists of the same length");
        return NULL;
    }
    PyObject *left = PyList_New(0);
    if (!left)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]) && i < PyList_Size(args[1]); i++) {
        PyObject *row = PyList_GetItem(args[0], i), *tensor = PyList_GetItem(args[1], i);
        Py_INCREF(row);
        Py_INCREF(tensor);
        const int taken = take_value(self, row, tensor, 0, 0);
        Py_DECREF(row);
        Py_DECREF(tensor);
        if (taken > 0)
            continue;
        PyObject *position = taken < 0 ? NULL : PyLong_FromSsize_t(i);
        const int added = position ? PyList_Append(left, position) : -1;
        Py_XDECREF(position);
        if (added < 0) {
            Py_DECREF(left);
            return NULL;
        }
    }
    return left;
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
    forget_all(self);
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
        forget_all(self);
    }
    return (PyObject *)self;
}

static void taker_free(Taker *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    forget_all(self);
    freefunc let_go = (freefunc)PyType_GetSlot(type, Py_tp_free);
    let_go(self);
    Py_DECREF(type);
}

static PyMethodDef taker_methods[] = {
    {"take", (PyCFunction)(void (*)(void))taker_take, METH_FASTCALL, NULL},
    {"put", (PyCFunction)(void (*)(void))taker_put, METH_FASTCALL, NULL},
    {"take_any", (PyCFunction)(void (*)(void))taker_take_any, METH_FASTCALL, NULL},
    {"take_all", (PyCFunction)(void (*)(void))taker_take_all, METH_FASTCALL, NULL},
    {"use_rows", (PyCFunction)(void (*)(void))taker_use_rows, METH_FASTCALL, NULL},
    {"forget", (PyCFunction)taker_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot taker_slots[] = {
    {Py_tp_new, (void *)taker_new},
    {Py_tp_dealloc, (void *)taker_free},
    {Py_tp_methods, taker_methods},
    {Py_tp_doc, "Rows that take tensors; for torchtap.reduce.stats_block alone."},
    {0, NULL},
};

static PyType_Spec taker_spec = {
    .name = "torchtap.reduce._native.Taker",
    .basicsize = sizeof(Taker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = taker_slots,
};

/* use_tensors(exchange, types): the capsule by which tensors of these types tell their memory. Says whether it will do. */
static PyObject *py_use_tensors(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 2 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) > PLAIN) {
        PyErr_SetString(PyExc_TypeError, "expected a capsule and a few types");
        return NULL;
    }
    const Exchange *given = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (!given)
        return NULL;
    while (given && given->version.major > 1)
        given = given->older;
    if (!given || given->version.major != 1 || !given->look)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args[1]); i++) {
        PyObject *type = PyTuple_GetItem(args[1], i);
        Py_INCREF(type); /* for good: they are torch's own */
        plain_types[i] = type;
    }
    exchange = given;
    Py_RETURN_TRUE;
}

static int add_taker(PyObject *module)
{
    name_is_inference = PyUnicode_InternFromString("is_inference");
    name_version = PyUnicode_InternFromString("_version");
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_storage = PyUnicode_InternFromString("untyped_storage");
    name_nbytes = PyUnicode_InternFromString("nbytes");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *type = PyType_FromSpec(&taker_spec);
    if (!type || !name_data_ptr)
        return -1;
    const int added = PyModule_AddObjectRef(module, "Taker", type);
    Py_DECREF(type);
    return added;
}
