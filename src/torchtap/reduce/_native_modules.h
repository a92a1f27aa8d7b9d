/* Whether the modules of a model are what they were: a look at each of them, as short as can be. Included by _native.c.
 *
 * A look inside a small model begins with this question, and takes no longer than a fraction of a millisecond itself. */

static PyObject *name_modules, *name_forward, *name_compiled;

/* What is known of the modules: lists, one item for each module, and one for each child of all of them in order. */
typedef struct {
    PyObject *references, *types, *counts; /* weak references, classes, how many children */
    PyObject *names, *children;            /* a child's name, and its number among the modules; -1 for None */
} Known;

/* The modules that are referred to, or NULL; with an error, or without one where a module is gone. */
static PyObject *modules_referred_to(PyObject *references)
{
    const Py_ssize_t count = PyList_Size(references);
    PyObject *modules = PyList_New(count);
    for (Py_ssize_t i = 0; modules && i < count; i++) {
        PyObject *module = PyWeakref_GetObject(PyList_GetItem(references, i));
        if (!module || module == Py_None) {
            Py_DECREF(modules);
            return NULL;
        }
        Py_INCREF(module);
        PyList_SetItem(modules, i, module);
    }
    return modules;
}

/* Whether a child is the one with this number; below zero: whether it is None. */
static int is_child(PyObject *child, PyObject *modules, Py_ssize_t number)
{
    if (number < 0)
        return child == Py_None;
    return number < PyList_Size(modules) && PyList_GetItem(modules, number) == child;
}

/* Whether a table of children has these names and modules in it, from number `first` on. */
static int has_children(PyObject *table, const Known *known, PyObject *modules, Py_ssize_t first, Py_ssize_t count)
{
    PyObject *name, *child;
    Py_ssize_t at = 0;
    if (!PyDict_Check(table) || PyDict_Size(table) != count)
        return 0;
    while (PyDict_Next(table, &at, &name, &child)) {
        PyObject *expected = PyList_GetItem(known->names, first);
        PyObject *number = PyList_GetItem(known->children, first++);
        if (!expected || !number || (name != expected && PyUnicode_Compare(name, expected) != 0) ||
            !is_child(child, modules, PyLong_AsSsize_t(number)))
            return 0;
    }
    return 1;
}

/* Whether a module is of its class, is not compiled, has no forward of its own, and has the children that it had. */
static int is_as_known(PyObject *modules, Py_ssize_t i, const Known *known, Py_ssize_t first, Py_ssize_t count)
{
    PyObject *module = PyList_GetItem(modules, i);
    if ((PyObject *)Py_TYPE(module) != PyList_GetItem(known->types, i))
        return 0;
    PyObject *own = PyObject_GenericGetDict(module, NULL);
    if (!own)
        return 0;
    PyObject *table = PyDict_GetItemWithError(own, name_modules);
    const int same = table && PyDict_Contains(own, name_forward) == 0 &&
                     PyDict_Contains(own, name_compiled) == 0 &&
                     has_children(table, known, modules, first, count);
    Py_DECREF(own);
    return same;
}

/* same_modules(references, types, counts, names, children): the modules, or None where anything is not as it was. */
static PyObject *py_same_modules(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    for (Py_ssize_t i = 0; i < nargs; i++)
        if (!PyList_Check(args[i]))
            nargs = -1;
    if (nargs != 5 || PyList_Size(args[0]) != PyList_Size(args[1]) || PyList_Size(args[0]) != PyList_Size(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected five lists, the first three of the same length");
        return NULL;
    }
    const Known known = {args[0], args[1], args[2], args[3], args[4]};
    PyObject *modules = modules_referred_to(known.references);
    Py_ssize_t first = 0;
    for (Py_ssize_t i = 0; modules && i < PyList_Size(modules); i++) {
        const Py_ssize_t count = PyLong_AsSsize_t(PyList_GetItem(known.counts, i));
        if (!is_as_known(modules, i, &known, first, count)) {
            Py_DECREF(modules);
            modules = NULL;
        }
        first += count;
    }
    if (modules)
        return modules;
    PyErr_Clear(); /* whatever it was: what cannot be looked at is not as it was */
    Py_RETURN_NONE;
}

static int name_attributes(void)
{
    name_modules = PyUnicode_InternFromString("_modules");
    name_forward = PyUnicode_InternFromString("forward");
    name_compiled = PyUnicode_InternFromString("_compiled_call_impl");
    return name_modules && name_forward && name_compiled;
}
