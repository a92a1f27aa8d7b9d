/* A module's output and its gradient, heard without Python in between. Included by _native.c.
 *
 * `Ear.hear` does what `Receiver.take` and `Asking.of_output` do for a call like most: a plain tensor, the first
 * call of its module in a pass that is heard, at a site of which nothing but its row is wanted. It says how far it came; the
 * rest is Python's, which asks all questions again. A `Listener` is what autograd calls with the gradient, and a
 * `BaseListener` what it calls at the node of a view's base (receive/gradients.py says why). A value that several
 * sites show has one listener.
 *
 * `take_each` takes many values at once, such as all parameters.
 *
 * All of it runs under the interpreter's lock. Nothing is counted or noted before the value is in its row. */

#define MOST_SITES 3      /* that one listener serves */
#define VIEW_DIMENSIONS 8 /* of a view whose gradient may have to be cut out of its base's */

enum { NOTHING_DONE, OUTPUT_TAKEN, ALL_DONE };

/* What torch has for this, set once by `use_autograd`. */
static PyObject *bearer;     /* a tensor that tables of hooks are handed over by */
static PyObject *empties;    /* a tensor without elements for each of the first dtypes */
static PyObject *cut_out;    /* (gradient of the base, shape, strides) -> gradient of the view */
static PyObject *zero;
static PyObject *name_grad_fn, *name_base, *name_output_nr, *name_hooks, *name_register, *name_data, *name_take_gradient;
static PyObject *name_detach, *name_requires_grad;

typedef struct {
    PyObject_HEAD PyObject *receiver, *output, *gradient; /* ports, or None where nobody asks */
} Ear;

typedef struct {
    PyObject_HEAD PyObject *receiver, *tally;
    PyObject *counter; /* of a view: counts its changes in place */
    PyObject *taker;   /* that knows who waits for the value, or NULL */
    PyObject *entries[MOST_SITES];
    Py_ssize_t serial;
    int sites, taken, dimensions;
    long long changes;
    int64_t shape[VIEW_DIMENSIONS], strides[VIEW_DIMENSIONS];
} Listener;

typedef struct {
    PyObject_HEAD PyObject *listener;
} BaseListener;

static PyTypeObject *ear_type, *listener_type, *base_listener_type;

/* ---- folding ---- */

/* Fold a small value into an entry's row. 1 done, 0 left to Python; no error is left set. */
static int fold_quickly(TallyFields *tally, const EntryFields *entry, PyObject *value, int *mark)
{
    const Py_ssize_t row = entry->row;
    *mark = -1;
    if (!is_record(tally->taker, taker_type) || !tally->arrived || !PyByteArray_Check(tally->arrived))
        return 0;
    PyObject *taker = tally->taker;
    Py_INCREF(taker);
    const int taken = take_into_row((Taker *)taker, row, value, 0, 0, mark);
    Py_DECREF(taker);
    if (taken < 0)
        PyErr_Clear(); /* Python tries again, and says it */
    if (taken <= 0 || row >= PyByteArray_Size(tally->arrived))
        return 0;
    PyByteArray_AsString(tally->arrived)[row] = 1;
    return 1;
}

/* The only value of a place, if it is the first of this step and nothing but a row wants it. */
static int take_only_value(const FoldingFields *folding, CallFields *port, PyObject *value)
{
    int mark;
    TallyFields *tally = (TallyFields *)folding->tally;
    if (!is_record(port->first, entry_fields) || !tally->arrived || !PyByteArray_Check(tally->arrived))
        return 0;
    EntryFields *entry = (EntryFields *)port->first;
    if (!entry->quick || entry->generation != folding->generation || entry->row < 0 ||
        entry->row >= PyByteArray_Size(tally->arrived) || PyByteArray_AsString(tally->arrived)[entry->row])
        return 0;
    Py_INCREF((PyObject *)entry);
    const int taken = fold_quickly(tally, entry, value, &mark);
    Py_DECREF((PyObject *)entry);
    if (taken)
        port->called = 1;
    return taken;
}

static int append_number(PyObject *list, Py_ssize_t number)
{
    PyObject *item = PyLong_FromSsize_t(number);
    const int added = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return added;
}

/* take_each(folding, ports, values): each value into the row of its port; the positions of those left to Python. */
static PyObject *py_take_each(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 3 || !is_record(args[0], folding_fields) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        PyList_Size(args[1]) != PyList_Size(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected a folding and two lists of the same length");
        return NULL;
    }
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < PyList_Size(args[1]) && i < PyList_Size(args[2]); i++) {
        const FoldingFields *folding = (FoldingFields *)args[0];
        PyObject *port = PyList_GetItem(args[1], i), *value = PyList_GetItem(args[2], i), *tally = folding->tally;
        int taken = 0;
        if (is_record(port, call_fields) && is_record(tally, tally_fields)) {
            Py_INCREF(port);
            Py_INCREF(value);
            Py_INCREF(tally);
            taken = take_only_value(folding, (CallFields *)port, value);
            Py_DECREF(port);
            Py_DECREF(value);
            Py_DECREF(tally);
        }
        if (!taken && append_number(left, i) < 0)
            Py_CLEAR(left);
    }
    return left;
}

/* ---- the gradient comes ---- */

/* Fold a gradient for one of the sites that wait for it; -1 with the error set. */
static int take_for(Listener *self, PyObject *entry, PyObject *gradient)
{
    int mark;
    const ReceiverFields *receiver = (ReceiverFields *)self->receiver;
    TallyFields *tally = (TallyFields *)self->tally;
    const FoldingFields *folding = (FoldingFields *)receiver->folding;
    const EntryFields *site = (EntryFields *)entry;
    if (receiver->open && tally->serial == self->serial && is_record(receiver->folding, folding_fields) &&
        folding->tally == self->tally && site->quick && site->generation == folding->generation &&
        fold_quickly(tally, site, gradient, &mark))
        return 0;
    PyObject *serial = PyLong_FromSsize_t(self->serial);
    PyObject *done = serial ? PyObject_CallMethodObjArgs(self->receiver, name_take_gradient, entry, self->tally, serial,
                                                         gradient, NULL)
                            : NULL;
    Py_XDECREF(serial);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *take_for_all(Listener *self, PyObject *gradient)
{
    if (gradient != Py_None) {
        self->taken = 1;
        for (int i = 0; i < self->sites; i++)
            if (take_for(self, self->entries[i], gradient) < 0)
                return NULL;
    }
    Py_RETURN_NONE;
}

/* The one argument of a call. */
static PyObject *only_argument(PyObject *args, PyObject *keywords)
{
    if (PyTuple_Size(args) == 1 && (!keywords || !PyDict_Size(keywords)))
        return PyTuple_GetItem(args, 0);
    PyErr_SetString(PyExc_TypeError, "expected a gradient");
    return NULL;
}

static PyObject *listener_call(Listener *self, PyObject *args, PyObject *keywords)
{
    PyObject *gradient = only_argument(args, keywords);
    return gradient ? take_for_all(self, gradient) : NULL;
}

static PyObject *tuple_of(const int64_t *numbers, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (!number || PyTuple_SetItem(tuple, i, number) < 0) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

/* The base is reached last. It counts if the view was not, because it was changed in place. */
static PyObject *base_listener_call(BaseListener *self, PyObject *args, PyObject *keywords)
{
    Listener *view = (Listener *)self->listener;
    PyObject *gradient = only_argument(args, keywords);
    if (!gradient)
        return NULL;
    if (!view)
        Py_RETURN_NONE;
    const int taken = view->taken;
    view->taken = 0; /* a retained graph may be gone through again */
    if (taken || gradient == Py_None || !view->counter)
        Py_RETURN_NONE;
    const long long changes = version_of(view->counter);
    if (PyErr_Occurred())
        return NULL;
    if (changes == view->changes)
        Py_RETURN_NONE;
    PyObject *shape = tuple_of(view->shape, view->dimensions), *strides = tuple_of(view->strides, view->dimensions);
    PyObject *part = shape && strides ? PyObject_CallFunctionObjArgs(cut_out, gradient, shape, strides, NULL) : NULL;
    PyObject *done = part ? take_for_all(view, part) : NULL;
    view->taken = 0;
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(part);
    return done;
}

/* Whoever recognises a value by its place in a taker must not find who is gone. */
static void be_unknown(Listener *self)
{
    Taker *taker = (Taker *)self->taker;
    for (int i = 0; taker && i < RECENT; i++)
        if (taker->asked[i] == (PyObject *)self)
            taker->asked[i] = NULL;
}

/* ---- asking for it ---- */

/* Have a node call `hear` with what comes to it. 1 done, 0 where torch has no such way. */
static int call_at(PyObject *node, PyObject *hear)
{
    PyObject *table = PyDict_New();
    PyObject *done = NULL;
    if (table && PyDict_SetItem(table, zero, hear) == 0 && PyObject_SetAttr(bearer, name_hooks, table) == 0) {
        done = PyObject_CallMethodObjArgs(node, name_register, bearer, NULL);
        PyObject *type, *value, *traceback; /* the bearer is handed back whatever came of it */
        PyErr_Fetch(&type, &value, &traceback);
        if (PyObject_SetAttr(bearer, name_hooks, Py_None) < 0)
            PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(table);
    Py_XDECREF(done);
    return done != NULL;
}

/* The node of a value that is the only one that its node makes; NULL where Python has to see to it. */
static PyObject *only_node_of(PyObject *value)
{
    PyObject *node = PyObject_GetAttr(value, name_grad_fn);
    PyObject *position = node && node != Py_None ? PyObject_GetAttr(value, name_output_nr) : NULL;
    const int first = position && PyLong_AsLong(position) == 0;
    Py_XDECREF(position);
    if (first)
        return node;
    Py_XDECREF(node);
    return NULL;
}

/* Whether the view shows all of a plainly laid out base, so that the base's gradient is the view's; notes its layout. */
static int covers(Listener *self, PyObject *value, PyObject *base, int *dtype)
{
    DLTensor view, whole;
    Memory shown, held;
    if (!is_plain(base) || exchange->look(value, &view) != 0 || exchange->look(base, &whole) != 0)
        return 0;
    if (view.dimensions > VIEW_DIMENSIONS || !view.strides || view.data != whole.data || view.offset != whole.offset)
        return 0;
    if (take_layout(&view, &shown) <= 0 || take_layout(&whole, &held) <= 0)
        return 0;
    self->dimensions = view.dimensions;
    for (int i = 0; i < view.dimensions; i++) {
        self->shape[i] = view.shape[i];
        self->strides[i] = view.strides[i];
    }
    *dtype = dl_dtype(&view);
    return held.contiguous && shown.elements == held.elements;
}

/* A tensor that counts the changes of a value in place, and holds no memory of it. */
static int count_changes(Listener *self, PyObject *value, int dtype)
{
    PyObject *empty = dtype >= 0 && dtype < PyTuple_Size(empties) ? PyTuple_GetItem(empties, dtype) : NULL;
    if (!empty)
        return 0;
    self->counter = PyObject_CallMethodObjArgs(value, name_detach, NULL);
    if (!self->counter || PyObject_SetAttr(self->counter, name_data, empty) < 0)
        return 0;
    self->changes = version_of(self->counter);
    return self->changes >= 0;
}

/* At a view's node and at its base's. */
static int listen_at_both(Listener *self, PyObject *value, PyObject *node, PyObject *base)
{
    int dtype, done = 0;
    PyObject *base_node = only_node_of(base);
    if (base_node && covers(self, value, base, &dtype) && count_changes(self, value, dtype)) {
        allocfunc make = (allocfunc)PyType_GetSlot(base_listener_type, Py_tp_alloc);
        BaseListener *at_base = (BaseListener *)make(base_listener_type, 0);
        if (at_base) {
            Py_INCREF((PyObject *)self);
            at_base->listener = (PyObject *)self;
            done = call_at(node, (PyObject *)self) && call_at(base_node, (PyObject *)at_base);
            Py_DECREF((PyObject *)at_base);
        }
    }
    Py_XDECREF(base_node);
    return done;
}

static int listen_at(Listener *self, PyObject *value)
{
    int done = 0;
    PyObject *node = only_node_of(value);
    PyObject *base = node ? PyObject_GetAttr(value, name_base) : NULL;
    if (base)
        done = base == Py_None ? call_at(node, (PyObject *)self) : listen_at_both(self, value, node, base);
    Py_XDECREF(node);
    Py_XDECREF(base);
    return done;
}

static int add_site(Listener *self, EntryFields *entry)
{
    if (self->sites == MOST_SITES)
        return 0;
    Py_INCREF((PyObject *)entry);
    self->entries[self->sites++] = (PyObject *)entry;
    return 1;
}

/* Who waits already for the gradient of the value that a taker has marked; NULL where nobody does. */
static Listener *waiting_for(const TallyFields *tally, PyObject *value, int mark)
{
    const Taker *taker = (Taker *)tally->taker;
    if (mark < 0 || !is_record(tally->taker, taker_type) || taker->recent.of[mark].tensor != value)
        return NULL;
    Listener *known = (Listener *)taker->asked[mark];
    return known && known->serial == tally->serial ? known : NULL;
}

/* Be known by the value's mark, for the next site that shows it. */
static void be_known(Listener *self, const TallyFields *tally, PyObject *value, int mark)
{
    Taker *taker = (Taker *)tally->taker;
    if (mark < 0 || !is_record(tally->taker, taker_type) || taker->recent.of[mark].tensor != value)
        return;
    Py_INCREF(tally->taker);
    self->taker = tally->taker;
    taker->asked[mark] = (PyObject *)self;
}

/* Ask autograd for the gradient of a value. 1 done, 0 left to Python. */
static int ask(Ear *self, TallyFields *tally, EntryFields *entry, PyObject *value, int mark)
{
    PyObject *learns = PyObject_GetAttr(value, name_requires_grad);
    Py_XDECREF(learns);
    if (learns != Py_True)
        return 0;
    Listener *known = waiting_for(tally, value, mark);
    if (known) {
        PyObject *node = only_node_of(value); /* somebody may have taken it out of its graph */
        Py_XDECREF(node);
        known = node ? waiting_for(tally, value, mark) : NULL;
        if (known && add_site(known, entry))
            return 1;
    }
    allocfunc make = (allocfunc)PyType_GetSlot(listener_type, Py_tp_alloc);
    Listener *listener = (Listener *)make(listener_type, 0);
    if (!listener)
        return 0;
    Py_INCREF(self->receiver);
    Py_INCREF((PyObject *)tally);
    listener->receiver = self->receiver;
    listener->tally = (PyObject *)tally;
    listener->serial = tally->serial;
    add_site(listener, entry);
    const int done = listen_at(listener, value);
    if (done)
        be_known(listener, tally, value, mark);
    else
        listener->sites = 0; /* one of two nodes may have it already */
    Py_DECREF((PyObject *)listener);
    return done;
}

/* ---- the value comes ---- */

static int hears_this_thread(const ReceiverFields *receiver)
{
    if (receiver->thread == Py_None)
        return 1;
    if (!receiver->thread || !PyLong_Check(receiver->thread))
        return 0;
    const long long thread = PyLong_AsLongLong(receiver->thread);
    return (unsigned long)thread == PyThread_get_thread_ident() && !PyErr_Occurred();
}

/* A forward that runs while autograd is at work is a checkpoint's repetition. */
static int is_repetition(void)
{
    PyObject *task = PyObject_CallNoArgs(graph_task);
    const int none = task && PyLong_AsLongLong(task) == -1;
    Py_XDECREF(task);
    return !none;
}

/* The entry of a call like most; NULL for any other. */
static EntryFields *entry_of_first_call(const CallFields *port, Py_ssize_t pass_number, Py_ssize_t generation)
{
    if (port->pass_number == pass_number || !is_record(port->first, entry_fields))
        return NULL;
    if (!port->leaf_calls || !PyDict_Check(port->leaf_calls) || PyDict_Size(port->leaf_calls))
        return NULL;
    EntryFields *entry = (EntryFields *)port->first;
    return entry->quick && entry->generation == generation ? entry : NULL;
}

static void count_first_call(CallFields *port, Py_ssize_t pass_number)
{
    port->pass_number = pass_number;
    port->calls = 1;
    port->recalls = 0;
    port->called = 1;
}

static int hear_value(Ear *self, const ReceiverFields *receiver, FoldingFields *folding, PyObject *value)
{
    const Py_ssize_t pass_number = receiver->pass_number, generation = folding->generation;
    TallyFields *tally = (TallyFields *)folding->tally;
    int mark = -1;
    if (self->output != Py_None) {
        CallFields *port = (CallFields *)self->output;
        EntryFields *entry = entry_of_first_call(port, pass_number, generation);
        Py_XINCREF((PyObject *)entry);
        const int taken = entry && fold_quickly(tally, entry, value, &mark);
        Py_XDECREF((PyObject *)entry);
        if (!taken)
            return NOTHING_DONE;
        count_first_call(port, pass_number);
    }
    if (self->gradient == Py_None)
        return ALL_DONE;
    CallFields *port = (CallFields *)self->gradient;
    EntryFields *entry = entry_of_first_call(port, pass_number, generation);
    if (!entry)
        return OUTPUT_TAKEN;
    Py_INCREF((PyObject *)entry);
    const int asked = ask(self, tally, entry, value, mark);
    if (asked) {
        count_first_call(port, pass_number);
        entry->asked = 1;
    }
    Py_DECREF((PyObject *)entry);
    return asked ? ALL_DONE : OUTPUT_TAKEN;
}

/* hear(value): 0 nothing was done, 1 the output was taken, 2 its gradient was asked for too, if anybody wants it. */
static PyObject *ear_hear(Ear *self, PyObject *value)
{
    const ReceiverFields *receiver = (ReceiverFields *)self->receiver;
    int done = NOTHING_DONE;
    if (receiver && is_plain(value) && !receiver->between_passes && hears_this_thread(receiver) && !is_repetition() &&
        is_record(receiver->folding, folding_fields)) {
        PyObject *folding = receiver->folding, *tally = ((FoldingFields *)folding)->tally;
        if (is_record(tally, tally_fields)) {
            Py_INCREF(folding);
            Py_INCREF(tally);
            done = hear_value(self, receiver, (FoldingFields *)folding, value);
            Py_DECREF(tally);
            Py_DECREF(folding);
        }
    }
    PyErr_Clear(); /* whatever it was: Python asks again, and says it */
    return PyLong_FromLong(done);
}

static int is_port(PyObject *given)
{
    return given == Py_None || is_record(given, call_fields);
}

/* Ear(receiver, output, gradient): the ports of a module's output and of its gradient; None where nobody asks. */
static PyObject *ear_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *receiver, *output, *gradient;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OOO", &receiver, &output, &gradient))
        return NULL;
    if (!is_record(receiver, receiver_fields) || !is_port(output) || !is_port(gradient) || !bearer) {
        PyErr_SetString(PyExc_TypeError, "expected a receiver and two ports, after use_autograd");
        return NULL;
    }
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Ear *self = (Ear *)make(type, 0);
    if (self) {
        Py_INCREF(receiver);
        Py_INCREF(output);
        Py_INCREF(gradient);
        self->receiver = receiver;
        self->output = output;
        self->gradient = gradient;
    }
    return (PyObject *)self;
}

/* use_autograd(bearer, empties, cut_out): what torch has to ask for gradients by. */
static PyObject *py_use_autograd(PyObject *self, PyObject *args)
{
    PyObject *given[3];
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!O", given, &PyTuple_Type, given + 1, given + 2))
        return NULL;
    PyObject **kept[3] = {&bearer, &empties, &cut_out};
    for (int i = 0; i < 3; i++) {
        PyObject *before = *kept[i];
        Py_INCREF(given[i]);
        *kept[i] = given[i];
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

/* ---- the types ---- */

HOLDER(three, 3)

#define HELD_BY_LISTENER (4 + MOST_SITES)
static int listener_visit(PyObject *self, visitproc visit, void *arg)
{
    return visit_held(self, HELD_BY_LISTENER, visit, arg);
}

static int listener_drop(PyObject *self)
{
    be_unknown((Listener *)self);
    ((Listener *)self)->sites = 0;
    return drop_held(self, HELD_BY_LISTENER);
}

static void listener_free(PyObject *self)
{
    be_unknown((Listener *)self);
    free_holder(self, HELD_BY_LISTENER);
}

static PyMethodDef ear_methods[] = {
    {"hear", (PyCFunction)ear_hear, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ear_slots[] = {
    {Py_tp_new, (void *)ear_new},         {Py_tp_traverse, (void *)three_visit},
    {Py_tp_clear, (void *)three_drop},    {Py_tp_dealloc, (void *)three_free},
    {Py_tp_methods, (void *)ear_methods}, {0, NULL},
};

static PyType_Slot listener_slots[] = {
    {Py_tp_call, (void *)listener_call},
    {Py_tp_traverse, (void *)listener_visit},
    {Py_tp_clear, (void *)listener_drop},
    {Py_tp_dealloc, (void *)listener_free},
    {0, NULL},
};

static PyType_Slot base_listener_slots[] = {
    {Py_tp_call, (void *)base_listener_call},
    {Py_tp_traverse, (void *)one_visit},
    {Py_tp_clear, (void *)one_drop},
    {Py_tp_dealloc, (void *)one_free},
    {0, NULL},
};

static PyType_Spec ear_spec = {
    .name = "torchtap.reduce._native.Ear",
    .basicsize = sizeof(Ear),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = ear_slots,
};

static PyType_Spec listener_spec = {
    .name = "torchtap.reduce._native.Listener",
    .basicsize = sizeof(Listener),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = listener_slots,
};

static PyType_Spec base_listener_spec = {
    .name = "torchtap.reduce._native.BaseListener",
    .basicsize = sizeof(BaseListener),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = base_listener_slots,
};

static int name_what_autograd_has(void)
{
    name_grad_fn = PyUnicode_InternFromString("grad_fn");
    name_base = PyUnicode_InternFromString("_base");
    name_output_nr = PyUnicode_InternFromString("output_nr");
    name_hooks = PyUnicode_InternFromString("_backward_hooks");
    name_register = PyUnicode_InternFromString("_register_hook_dict");
    name_data = PyUnicode_InternFromString("data");
    name_detach = PyUnicode_InternFromString("detach");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_take_gradient = PyUnicode_InternFromString("take_gradient");
    zero = PyLong_FromLong(0);
    return !PyErr_Occurred();
}

static int add_hearing(PyObject *module)
{
    if (!name_what_autograd_has() || add_type(module, "Ear", &ear_spec, &ear_type) < 0 ||
        add_type(module, "Listener", &listener_spec, &listener_type) < 0)
        return -1;
    return add_type(module, "BaseListener", &base_listener_spec, &base_listener_type);
}
