/* Hooks that go into torch's tables and come out again, many at a time. Included by _native.c.
 *
 * Torch's tables are asked for by their names each time, since others may have put new ones in their place. A hook comes out
 * of the table that it was put into. `hooks/hooks.py` has the same in Python, and says what the lists hold. */

static PyObject *name_state, *name_count, *name_move;

enum { ENTRY_MODULE, ENTRY_TABLE, ENTRY_NUMBER, ENTRY_VALUE, ENTRY_FIRST, ENTRY_STATE, ENTRY_FIELDS };

/* A field of entry i, borrowed; NULL with an error where the list holds something else. */
static PyObject *field_of(PyObject *entries, Py_ssize_t i, Py_ssize_t field)
{
    PyObject *entry = PyList_GetItem(entries, i);
    if (entry && !(PyTuple_Check(entry) && PyTuple_Size(entry) == ENTRY_FIELDS)) {
        PyErr_SetString(PyExc_TypeError, "an entry is a tuple of six");
        return NULL;
    }
    return entry ? PyTuple_GetItem(entry, field) : NULL;
}

/* The table that a module has for entry i now: a new reference. */
static PyObject *table_of(PyObject *entries, Py_ssize_t i)
{
    PyObject *module = field_of(entries, i, ENTRY_MODULE);
    return module ? PyObject_GetAttr(module, field_of(entries, i, ENTRY_TABLE)) : NULL;
}

static int put_entry(PyObject *table, PyObject *entries, Py_ssize_t i)
{
    PyObject *number = field_of(entries, i, ENTRY_NUMBER);
    if (PyObject_SetItem(table, number, field_of(entries, i, ENTRY_VALUE)) < 0)
        return -1;
    if (field_of(entries, i, ENTRY_FIRST) != Py_True)
        return 0;
    PyObject *moved = PyObject_CallMethodObjArgs(table, name_move, number, Py_False, NULL);
    Py_XDECREF(moved);
    return moved ? 0 : -1;
}

/* Take entries out of their tables, the last one first. What others have taken out already is no error. */
static int take_entries(PyObject *entries, PyObject *tables)
{
    for (Py_ssize_t i = PyList_Size(tables) - 1; i >= 0; i--) {
        PyObject *table = PyList_GetItem(tables, i), *number = field_of(entries, i, ENTRY_NUMBER);
        const int there = table && number ? PySequence_Contains(table, number) : -1;
        if (there < 0 || (there && PyObject_DelItem(table, number) < 0))
            return -1;
    }
    return 0;
}

/* Add to the number of our things on a module, which its state counts. */
static int add_to_count(PyObject *state, long more, long *count)
{
    PyObject *before = PyObject_GetAttr(state, name_count);
    if (!before)
        return -1;
    *count = PyLong_AsLong(before) + more;
    Py_DECREF(before);
    PyObject *now = PyErr_Occurred() ? NULL : PyLong_FromLong(*count);
    const int failed = !now || PyObject_SetAttr(state, name_count, now) < 0;
    Py_XDECREF(now);
    return failed ? -1 : 0;
}

/* The `__dict__` of entry i's module, a new reference; and the state that is in it already, borrowed or NULL. */
static PyObject *own_of(PyObject *entries, Py_ssize_t i, PyObject *state, PyObject **present)
{
    PyObject *own = PyObject_GenericGetDict(field_of(entries, i, ENTRY_MODULE), NULL);
    if (!own)
        return NULL;
    *present = PyDict_GetItemWithError(own, name_state);
    if (*present && Py_TYPE(*present) != Py_TYPE(state))
        *present = NULL;
    if (PyErr_Occurred())
        Py_CLEAR(own);
    return own;
}

/* Keep entry i out of its module's copies, if it has a state for that. */
static int conceal_entry(PyObject *entries, Py_ssize_t i)
{
    PyObject *state = field_of(entries, i, ENTRY_STATE), *present;
    long count;
    if (!state || state == Py_None)
        return state ? 0 : -1;
    PyObject *own = own_of(entries, i, state, &present);
    int failed = !own;
    if (own && present)
        failed = add_to_count(present, 1, &count) < 0;
    else if (own) {
        PyObject *one = PyLong_FromLong(1);
        failed = !one || PyObject_SetAttr(state, name_count, one) < 0 || PyDict_SetItem(own, name_state, state) < 0;
        Py_XDECREF(one);
    }
    Py_XDECREF(own);
    return failed ? -1 : 0;
}

static int reveal_entry(PyObject *entries, Py_ssize_t i)
{
    PyObject *state = field_of(entries, i, ENTRY_STATE), *present;
    long count = 1;
    if (!state || state == Py_None)
        return state ? 0 : -1;
    PyObject *own = own_of(entries, i, state, &present);
    int failed = !own;
    if (own && present)
        failed = add_to_count(present, -1, &count) < 0 || (!count && PyDict_DelItem(own, name_state) < 0);
    Py_XDECREF(own);
    return failed ? -1 : 0;
}

static int are_lists(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t expected)
{
    for (Py_ssize_t i = 0; i < nargs; i++)
        if (!PyList_Check(args[i]))
            nargs = -1;
    if (nargs != expected)
        PyErr_Format(PyExc_TypeError, "expected %zd lists", expected);
    return nargs == expected;
}

/* put_in_tables(entries): the tables into which they went. Where one fails, none is on. */
static PyObject *py_put_in_tables(PyObject *self, PyObject *entries)
{
    (void)self;
    if (!are_lists(&entries, 1, 1))
        return NULL;
    PyObject *tables = PyList_New(0);
    int failed = !tables;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(entries); i++) {
        PyObject *table = table_of(entries, i);
        failed = !table || PyList_Append(tables, table) < 0 || put_entry(table, entries, i) < 0;
        Py_XDECREF(table);
    }
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(entries); i++)
        failed = conceal_entry(entries, i) < 0;
    if (!failed)
        return tables;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (tables && take_entries(entries, tables) < 0)
        PyErr_Clear();
    PyErr_Restore(type, error, trace);
    Py_XDECREF(tables);
    return NULL;
}

/* take_from_tables(entries, tables) */
static PyObject *py_take_from_tables(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (!are_lists(args, nargs, 2) || take_entries(args[0], args[1]) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]); i++)
        if (reveal_entry(args[0], i) < 0)
            return NULL;
    Py_RETURN_NONE;
}

/* are_in_tables(entries): whether each is in the table that its module has now. */
static PyObject *py_are_in_tables(PyObject *self, PyObject *entries)
{
    (void)self;
    if (!are_lists(&entries, 1, 1))
        return NULL;
    int there = 1;
    for (Py_ssize_t i = 0; there > 0 && i < PyList_Size(entries); i++) {
        PyObject *table = table_of(entries, i);
        there = table ? PySequence_Contains(table, field_of(entries, i, ENTRY_NUMBER)) : -1;
        Py_XDECREF(table);
    }
    return there < 0 ? NULL : PyBool_FromLong(there);
}

static int name_of_hooks(void)
{
    name_state = PyUnicode_InternFromString("__getstate__");
    name_count = PyUnicode_InternFromString("count");
    name_move = PyUnicode_InternFromString("move_to_end");
    return name_state && name_count && name_move;
}
