/* Copies of small values: from a Python tensor to a copy of it, in one call. Included by _native.c.
 *
 * One copy serves every place at which the same value is shown, since copies are never changed: one of the last few
 * tensors that comes again gets the copy that it has. What is large, lies in another order or is no plain memory is left
 * to Python (None), and nothing of it was read. */

typedef struct {
    PyObject_HEAD PyObject *clone; /* makes a contiguous copy */
    PyObject *others;              /* functions; each answers None where nobody makes something else of a copy */
    Py_ssize_t most;               /* values of so many bytes are not small */
    Marks recent;
    PyObject *copies[RECENT]; /* of the tensors that are marked */
} Copier;

static void keep_copy(Copier *self, PyObject *tensor, long long version, PyObject *copy)
{
    const int place = set_mark(&self->recent, tensor, version);
    if (place < 0)
        return;
    PyObject *before = self->copies[place];
    Py_INCREF(copy);
    self->copies[place] = copy;
    Py_XDECREF(before);
}

/* A copy without gradient history; NULL with the error set. */
static PyObject *copy_of(Copier *self, PyObject *tensor)
{
    PyObject *learns = PyObject_GetAttr(tensor, name_requires_grad);
    if (!learns)
        return NULL;
    Py_DECREF(learns);
    if (learns != Py_True)
        return PyObject_CallFunctionObjArgs(self->clone, tensor, NULL);
    PyObject *plain = PyObject_CallMethodObjArgs(tensor, name_detach, NULL);
    PyObject *copy = plain ? PyObject_CallFunctionObjArgs(self->clone, plain, NULL) : NULL;
    Py_XDECREF(plain);
    return copy;
}

/* 1 where a tensor is plain memory that is small and in order, and nobody follows; 0 where Python has to see to it. */
static int is_copied_here(Copier *self, PyObject *tensor)
{
    Memory memory;
    for (Py_ssize_t i = 0; i < PyTuple_Size(self->others); i++) {
        PyObject *other = PyObject_CallNoArgs(PyTuple_GetItem(self->others, i));
        Py_XDECREF(other);
        if (other != Py_None)
            return 0;
    }
    if (!locate(tensor, &memory))
        return 0;
    Py_XDECREF(memory.storage);
    return memory.contiguous && memory.elements * ITEM_BYTES[memory.dtype] < (size_t)self->most;
}

/* copy(value): a copy, or None for what is left to Python. */
static PyObject *copier_copy(Copier *self, PyObject *tensor)
{
    if (!is_plain(tensor))
        Py_RETURN_NONE;
    const long long version = version_of(tensor);
    const int place = find_mark(&self->recent, tensor, version);
    if (place >= 0) {
        Py_INCREF(self->copies[place]);
        return self->copies[place];
    }
    if (PyErr_Occurred() || !is_copied_here(self, tensor)) {
        PyErr_Clear(); /* whatever it was: Python asks again, and says it */
        Py_RETURN_NONE;
    }
    PyObject *copy = copy_of(self, tensor); /* other threads may run meanwhile, and come here */
    if (copy)
        keep_copy(self, tensor, version, copy);
    return copy;
}

static void forget_copies(Copier *self)
{
    forget_marks(&self->recent);
    for (int i = 0; i < RECENT; i++) {
        PyObject *before = self->copies[i];
        self->copies[i] = NULL;
        Py_XDECREF(before);
    }
}

/* forget(): no value was seen. */
static PyObject *copier_forget(Copier *self, PyObject *unused)
{
    (void)unused;
    forget_copies(self);
    Py_RETURN_NONE;
}

/* Copier(clone, others, most) */
static PyObject *copier_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *clone, *others;
    Py_ssize_t most;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OO!n", &clone, &PyTuple_Type, &others, &most))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Copier *self = (Copier *)make(type, 0);
    if (self) {
        Py_INCREF(clone);
        Py_INCREF(others);
        self->clone = clone;
        self->others = others;
        self->most = most;
        forget_copies(self);
    }
    return (PyObject *)self;
}

static void copier_free(Copier *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    forget_copies(self);
    Py_DECREF(self->clone);
    Py_DECREF(self->others);
    freefunc let_go = (freefunc)PyType_GetSlot(type, Py_tp_free);
    let_go(self);
    Py_DECREF(type);
}

static PyMethodDef copier_methods[] = {
    {"copy", (PyCFunction)copier_copy, METH_O, NULL},
    {"forget", (PyCFunction)copier_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot copier_slots[] = {
    {Py_tp_new, (void *)copier_new},
    {Py_tp_dealloc, (void *)copier_free},
    {Py_tp_methods, copier_methods},
    {Py_tp_doc, "Copies of small values; for torchtap.taps.receive alone."},
    {0, NULL},
};

static PyType_Spec copier_spec = {
    .name = "torchtap.reduce._native.Copier",
    .basicsize = sizeof(Copier),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = copier_slots,
};

static int add_copier(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&copier_spec);
    if (!type)
        return -1;
    const int added = PyModule_AddObjectRef(module, "Copier", type);
    Py_DECREF(type);
    return added;
}
