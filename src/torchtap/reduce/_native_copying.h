/* Whole values kept: from a Python tensor to a copy of its bytes, in one call. Included by _native.c.
 *
 * While the model runs, nothing is asked of its allocator: a copy is bytes and a shape (`Copied`), and a tensor is made
 * of it when somebody looks. A tensor that is made in the middle of a pass, however small, lies where the model had its
 * own values, and the next of these no longer fits there and goes to fresh memory. The bytes of small values lie in the
 * object itself, those of large ones in memory that was used before and that is lent for as long as the object lives.
 *
 * One copy serves every place at which the same value is shown, since copies are never changed: one of the last few large
 * tensors that comes again, or of the last few small ones, gets the copy that it has. What lies in another order or is no plain
 * memory is left to Python, and nothing of it was read. */

#define COPY_ALIGNMENT 64 /* as torch's own memory: what is computed from it may depend on that in its last digits */

typedef struct {
    PyObject_VAR_HEAD PyObject *lent; /* a buffer; NULL where the bytes lie here */
    PyObject *give_back;              /* takes the buffer */
    char *data;
    Py_ssize_t bytes;
    int dtype, dimensions;
    int64_t shape[]; /* and behind it the bytes of a small value */
} Copied;

typedef struct {
    PyObject_HEAD PyObject *lend, *give_back; /* large memory, and what takes it back */
    PyObject *tracer;                         /* () -> the tracer that follows the model; None where none does */
    Py_ssize_t small;                         /* values of fewer bytes are small */
    PyObject *waiting;                        /* (a place's number, the pass, a copy), in the order in which they came */
    struct {
        Copied *copy;
        const char *from; /* where it was copied from */
    } last[RECENT];       /* of small values */
    int next;             /* which of them is the oldest */
    Marks recent;         /* large values */
    PyObject *copies[RECENT];                 /* of the tensors that are marked */
} Keeper;

static PyTypeObject *copied_type;

/* Past the cache, where what the model needs next is; an ordinary store would also fetch each line that it writes over. */
static void copy_past_cache(char *target, const char *source, size_t bytes)
{
    size_t done = 0;
#ifdef HAVE_X86_CHOICE
    for (; done + COPY_ALIGNMENT <= bytes; done += COPY_ALIGNMENT)
        for (int i = 0; i < COPY_ALIGNMENT; i += 16) {
            const __m128i part = _mm_loadu_si128((const __m128i *)(source + done + i));
            _mm_stream_si128((__m128i *)(target + done + i), part);
        }
    _mm_sfence();
#endif
    memcpy(target + done, source + done, bytes - done);
}

static char *aligned(char *address)
{
    const uintptr_t beyond = (uintptr_t)address % COPY_ALIGNMENT;
    return beyond ? address + (COPY_ALIGNMENT - beyond) : address;
}

static Copied *new_copied(const Memory *memory, Py_ssize_t bytes, Py_ssize_t inside)
{
    const Py_ssize_t room = (Py_ssize_t)sizeof(int64_t) * memory->dimensions + inside;
    Copied *copied = PyObject_NewVar(Copied, copied_type, room);
    if (!copied)
        return NULL;
    copied->lent = copied->give_back = NULL;
    copied->data = aligned((char *)(copied->shape + memory->dimensions));
    copied->bytes = bytes;
    copied->dtype = memory->dtype;
    copied->dimensions = memory->dimensions;
    for (int i = 0; i < memory->dimensions; i++)
        copied->shape[i] = memory->shape[i];
    return copied;
}

/* Whether a small value is this copy's: the same bytes, shape and place. Asked sooner than a tensor's version. */
static int is_copy_of(const Copied *copy, const Memory *memory, Py_ssize_t bytes)
{
    return copy->dtype == memory->dtype && copy->dimensions == memory->dimensions &&
           memcmp(copy->shape, memory->shape, sizeof(int64_t) * (size_t)copy->dimensions) == 0 &&
           memcmp(copy->data, memory->raw, (size_t)bytes) == 0;
}

static PyObject *copy_small(Keeper *self, const Memory *memory, Py_ssize_t bytes)
{
    Copied *copied = NULL;
    for (int i = 0; !copied && i < RECENT; i++)
        if (self->last[i].copy && self->last[i].from == memory->raw && is_copy_of(self->last[i].copy, memory, bytes))
            copied = self->last[i].copy;
    if (copied) {
        Py_INCREF((PyObject *)copied);
        return (PyObject *)copied;
    }
    copied = new_copied(memory, bytes, bytes + COPY_ALIGNMENT);
    if (!copied)
        return NULL;
    memcpy(copied->data, memory->raw, (size_t)bytes);
    PyObject *oldest = (PyObject *)self->last[self->next].copy;
    Py_INCREF((PyObject *)copied);
    self->last[self->next].copy = copied;
    self->last[self->next].from = memory->raw;
    self->next = (self->next + 1) % RECENT;
    Py_XDECREF(oldest);
    return (PyObject *)copied;
}

/* Have memory for a large value lent: 1, 0 where there is none, -1 with the error set. */
static int borrow(Keeper *self, Copied *copied)
{
    Py_buffer view;
    PyObject *size = PyLong_FromSsize_t(copied->bytes);
    PyObject *lent = size ? PyObject_CallFunctionObjArgs(self->lend, size, NULL) : NULL;
    Py_XDECREF(size);
    if (!lent || lent == Py_None || PyObject_GetBuffer(lent, &view, PyBUF_WRITABLE)) {
        Py_XDECREF(lent);
        return lent == Py_None ? 0 : -1;
    }
    copied->data = view.buf;
    PyBuffer_Release(&view); /* the memory is there as long as what was lent */
    Py_INCREF(self->give_back);
    copied->give_back = self->give_back;
    copied->lent = lent;
    return 1;
}

/* None where no memory is lent, NULL with the error set. Other threads may run meanwhile. */
static PyObject *copy_large(Keeper *self, const Memory *memory, Py_ssize_t bytes)
{
    Copied *copied = new_copied(memory, bytes, 0);
    const int lent = copied ? borrow(self, copied) : -1;
    if (lent <= 0) {
        Py_XDECREF((PyObject *)copied);
        if (lent < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    Py_BEGIN_ALLOW_THREADS
    copy_past_cache(copied->data, memory->raw, (size_t)bytes);
    Py_END_ALLOW_THREADS
    return (PyObject *)copied;
}

/* Whether a tensor is plain memory in order; what it found is then in `memory`. A value of a transform has none. What is
 * traced is left to Python each time: TorchScript's tracer names values by the variables of the frames above it, and
 * compares two runs. */
static int is_copied_here(Keeper *self, PyObject *tensor, Memory *memory)
{
    PyObject *tracer = PyObject_CallNoArgs(self->tracer);
    Py_XDECREF(tracer);
    if (tracer != Py_None || !locate(tensor, memory))
        return 0;
    if (memory->contiguous && memory->elements)
        return 1;
    Py_XDECREF(memory->storage);
    return 0;
}

/* The copy of a large tensor: the one that it has, or a new one. */
static PyObject *shared_copy(Keeper *self, PyObject *tensor, const Memory *memory, Py_ssize_t bytes)
{
    const long long version = version_of(tensor);
    int place = find_mark(&self->recent, tensor, version);
    PyErr_Clear(); /* whatever it was: it is not known again */
    if (place >= 0) {
        Py_INCREF(self->copies[place]);
        return self->copies[place];
    }
    PyObject *copy = copy_large(self, memory, bytes);
    place = copy && copy != Py_None ? set_mark(&self->recent, tensor, version) : -1;
    if (place >= 0) {
        PyObject *before = self->copies[place];
        Py_INCREF(copy);
        self->copies[place] = copy;
        Py_XDECREF(before);
    }
    return copy;
}

/* None for what is left to Python, NULL with the error set. */
static PyObject *copy_of(Keeper *self, PyObject *tensor)
{
    Memory memory;
    if (!is_copied_here(self, tensor, &memory)) {
        PyErr_Clear(); /* whatever it was: Python asks again, and says it */
        Py_RETURN_NONE;
    }
    const Py_ssize_t bytes = (Py_ssize_t)(memory.elements * ITEM_BYTES[memory.dtype]);
    PyObject *copy =
        bytes < self->small ? copy_small(self, &memory, bytes) : shared_copy(self, tensor, &memory, bytes);
    Py_XDECREF(memory.storage);
    return copy;
}

/* A copy is waiting now, with the place's number and the pass: 1; 0 for what is left to Python, -1 with the error set. */
static int keep(Keeper *self, PyObject *number, Py_ssize_t pass_number, PyObject *value)
{
    PyObject *copy = copy_of(self, value);
    if (!copy || copy == Py_None) {
        Py_XDECREF(copy);
        return copy ? 0 : -1;
    }
    PyObject *pass = PyLong_FromSsize_t(pass_number), *item = pass ? PyTuple_Pack(3, number, pass, copy) : NULL;
    const int failed = !item || PyList_Append(self->waiting, item) < 0;
    Py_XDECREF(pass);
    Py_XDECREF(item);
    Py_DECREF(copy);
    return failed ? -1 : 1;
}

/* hear(receiver, stop, value): whether a copy is now waiting. False: nothing was done, Python asks again. A stop is a tuple
 * that begins with the place's number. */
static PyObject *keeper_hear(Keeper *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !is_record(args[0], receiver_fields) || !PyTuple_Check(args[1]) || !PyTuple_Size(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a receiver, a stop and a value");
        return NULL;
    }
    const ReceiverFields *receiver = (ReceiverFields *)args[0];
    const int heard = is_plain(args[2]) && !receiver->between_passes && hears_this_thread(receiver) && !is_repetition();
    const int kept = heard ? keep(self, PyTuple_GetItem(args[1], 0), receiver->pass_number, args[2]) : 0;
    PyErr_Clear(); /* whatever it was: Python asks again, and says it */
    return PyBool_FromLong(kept > 0);
}

/* copies(args, kwargs, output): a call as it was: ((copy,), kwargs, copy), of one tensor that is given and one that comes
 * back. None for any other call: nothing was done, Python asks again. */
static PyObject *keeper_copies(Keeper *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a call's arguments and its output");
        return NULL;
    }
    PyObject *input = PyTuple_Size(args[0]) == 1 && !PyDict_Size(args[1]) ? PyTuple_GetItem(args[0], 0) : NULL;
    PyObject *answer = NULL;
    if (input && is_plain(input) && is_plain(args[2])) {
        PyObject *given = copy_of(self, input), *made = given && given != Py_None ? copy_of(self, args[2]) : NULL;
        if (made && made != Py_None)
            answer = Py_BuildValue("((O)OO)", given, args[1], made);
        Py_XDECREF(given);
        Py_XDECREF(made);
    }
    if (answer)
        return answer;
    PyErr_Clear(); /* whatever it was: Python asks again, and says it */
    Py_RETURN_NONE;
}

/* drain(): all that is waiting; nothing is, afterwards. */
static PyObject *keeper_drain(Keeper *self, PyObject *unused)
{
    (void)unused;
    PyObject *empty = PyList_New(0), *before = self->waiting;
    if (!empty)
        return NULL;
    self->waiting = empty;
    return before;
}

static void forget_copies(Keeper *self)
{
    forget_marks(&self->recent);
    for (int i = 0; i < RECENT; i++) {
        PyObject *large = self->copies[i], *small = (PyObject *)self->last[i].copy;
        self->copies[i] = NULL;
        self->last[i].copy = NULL;
        Py_XDECREF(large);
        Py_XDECREF(small);
    }
}

/* forget(): recognise none of the values that came. */
static PyObject *keeper_forget(Keeper *self, PyObject *unused)
{
    (void)unused;
    forget_copies(self);
    Py_RETURN_NONE;
}

/* Keeper(tracer, small, lend, give_back) */
static PyObject *keeper_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *lend, *give_back, *tracer;
    Py_ssize_t small;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OnOO", &tracer, &small, &lend, &give_back))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Keeper *self = (Keeper *)make(type, 0);
    if (!self)
        return NULL;
    Py_INCREF(lend);
    Py_INCREF(give_back);
    Py_INCREF(tracer);
    self->tracer = tracer;
    self->lend = lend;
    self->give_back = give_back;
    self->small = small;
    self->waiting = PyList_New(0);
    forget_copies(self);
    if (!self->waiting) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void keeper_free(Keeper *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    forget_copies(self);
    Py_DECREF(self->lend);
    Py_DECREF(self->give_back);
    Py_DECREF(self->tracer);
    Py_XDECREF(self->waiting);
    freefunc let_go = (freefunc)PyType_GetSlot(type, Py_tp_free);
    let_go(self);
    Py_DECREF(type);
}

static PyObject *keeper_waiting(Keeper *self, void *unused)
{
    (void)unused;
    Py_INCREF(self->waiting);
    return self->waiting;
}

static PyMethodDef keeper_methods[] = {
    {"hear", (PyCFunction)(void (*)(void))keeper_hear, METH_FASTCALL, NULL},
    {"copies", (PyCFunction)(void (*)(void))keeper_copies, METH_FASTCALL, NULL},
    {"drain", (PyCFunction)keeper_drain, METH_NOARGS, NULL},
    {"forget", (PyCFunction)keeper_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef keeper_attributes[] = {
    {"waiting", (getter)keeper_waiting, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot keeper_slots[] = {
    {Py_tp_new, (void *)keeper_new},
    {Py_tp_dealloc, (void *)keeper_free},
    {Py_tp_methods, keeper_methods},
    {Py_tp_getset, keeper_attributes},
    {Py_tp_doc, "Keeps whole values; for torchtap.receive alone."},
    {0, NULL},
};

static PyType_Spec keeper_spec = {
    .name = "torchtap.reduce._native.Keeper",
    .basicsize = sizeof(Keeper),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = keeper_slots,
};

/* The last one to hold a copy is gone, be it a tensor over it: what was lent goes back. */
static void copied_free(Copied *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->lent) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        PyObject *done = PyObject_CallFunctionObjArgs(self->give_back, self->lent, NULL);
        Py_XDECREF(done);
        PyErr_Restore(kind, value, trace); /* memory that cannot be given back is let go of */
        Py_DECREF(self->give_back);
        Py_DECREF(self->lent);
    }
    freefunc let_go = (freefunc)PyType_GetSlot(type, Py_tp_free);
    let_go(self);
    Py_DECREF(type);
}

static int copied_buffer(Copied *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->data, self->bytes, 0, flags);
}

static PyObject *copied_shape(Copied *self, void *unused)
{
    (void)unused;
    PyObject *shape = PyTuple_New(self->dimensions);
    for (int i = 0; shape && i < self->dimensions; i++) {
        PyObject *size = PyLong_FromLongLong(self->shape[i]);
        if (!size || PyTuple_SetItem(shape, i, size) < 0)
            Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *copied_dtype(Copied *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(self->dtype);
}

static PyGetSetDef copied_attributes[] = {
    {"shape", (getter)copied_shape, NULL, NULL, NULL},
    {"dtype", (getter)copied_dtype, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot copied_slots[] = {
    {Py_tp_dealloc, (void *)copied_free},
    {Py_tp_getset, copied_attributes},
    {Py_bf_getbuffer, (void *)copied_buffer},
    {Py_tp_doc, "The bytes of a value, its shape, and the number of its dtype."},
    {0, NULL},
};

static PyType_Spec copied_spec = {
    .name = "torchtap.reduce._native.Copied",
    .basicsize = sizeof(Copied),
    .itemsize = 1,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = copied_slots,
};

static int add_keeper(PyObject *module)
{
    copied_type = (PyTypeObject *)PyType_FromSpec(&copied_spec);
    PyObject *type = copied_type ? PyType_FromSpec(&keeper_spec) : NULL;
    if (!type)
        return -1;
    const int added = PyModule_AddObjectRef(module, "Keeper", type);
    Py_DECREF(type);
    return added < 0 ? added : PyModule_AddObjectRef(module, "Copied", (PyObject *)copied_type);
}
