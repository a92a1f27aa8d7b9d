/* The fields that are asked for at every value, as native code and Python both see them. Included by _native.c.
 *
 * Each type here is the base of a Python class (hooks/records.py), which adds methods and all other fields. A field is
 * one memory access from here and an attribute there, so there is one truth and no copy of it. Whatever Python has put into
 * a field that holds an object is asked for its type (`is_record`) before it is believed. */

#include <structmember.h>

/* What a type holds comes first, right behind the head: `held` of them. */
#define HELD_BY(self) ((PyObject **)((PyObject *)(self) + 1))

/* Of a place of the model: which call of it this is. */
typedef struct {
    PyObject_HEAD PyObject *leaf_calls, *first; /* a dict; the entry of the first call, or None */
    Py_ssize_t pass_number, calls, recalls;
    char called;
} CallFields;

/* Of a site that was seen: its row. */
typedef struct {
    PyObject_HEAD Py_ssize_t generation, row;
    char quick, asked;
} EntryFields;

/* Of what one phase has folded: where rows are. */
typedef struct {
    PyObject_HEAD PyObject *taker, *arrived; /* a Taker, or None; a bytearray */
    Py_ssize_t serial;
} TallyFields;

/* Which tally is folded into. */
typedef struct {
    PyObject_HEAD PyObject *tally;
    Py_ssize_t generation;
} FoldingFields;

/* Who is heard, and where in a step it is. */
typedef struct {
    PyObject_HEAD PyObject *thread, *folding; /* a thread's identity, or None for all of them */
    Py_ssize_t pass_number;
    char open, between_passes;
} ReceiverFields;

static PyTypeObject *call_fields, *entry_fields, *tally_fields, *folding_fields, *receiver_fields;

static int is_record(PyObject *object, PyTypeObject *type)
{
    return object && type && PyObject_TypeCheck(object, type);
}

static int visit_held(PyObject *self, int held, visitproc visit, void *arg)
{
    for (int i = 0; i < held; i++)
        Py_VISIT(HELD_BY(self)[i]);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int drop_held(PyObject *self, int held)
{
    for (int i = 0; i < held; i++) {
        PyObject *before = HELD_BY(self)[i];
        HELD_BY(self)[i] = NULL;
        Py_XDECREF(before);
    }
    return 0;
}

/* Of an instance of a class that Python has made of one of these types, too: its class is let go of here. */
static void free_holder(PyObject *self, int held)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    drop_held(self, held);
    freefunc let_go = (freefunc)PyType_GetSlot(type, Py_tp_free);
    let_go(self);
    Py_DECREF(type);
}

#define HOLDER(name, held)                                                        \
    static int name##_visit(PyObject *self, visitproc visit, void *arg)           \
    {                                                                             \
        return visit_held(self, held, visit, arg);                                \
    }                                                                             \
    static int name##_drop(PyObject *self)                                        \
    {                                                                             \
        return drop_held(self, held);                                             \
    }                                                                             \
    static void name##_free(PyObject *self)                                       \
    {                                                                             \
        free_holder(self, held);                                                  \
    }

HOLDER(nothing, 0)
HOLDER(one, 1)
HOLDER(two, 2)

static PyMemberDef call_members[] = {
    {"leaf_calls", T_OBJECT, offsetof(CallFields, leaf_calls), 0, NULL},
    {"first", T_OBJECT, offsetof(CallFields, first), 0, NULL},
    {"pass_number", T_PYSSIZET, offsetof(CallFields, pass_number), 0, NULL},
    {"calls", T_PYSSIZET, offsetof(CallFields, calls), 0, NULL},
    {"recalls", T_PYSSIZET, offsetof(CallFields, recalls), 0, NULL},
    {"called", T_BOOL, offsetof(CallFields, called), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef entry_members[] = {
    {"generation", T_PYSSIZET, offsetof(EntryFields, generation), 0, NULL},
    {"row", T_PYSSIZET, offsetof(EntryFields, row), 0, NULL},
    {"quick", T_BOOL, offsetof(EntryFields, quick), 0, NULL},
    {"asked", T_BOOL, offsetof(EntryFields, asked), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef tally_members[] = {
    {"taker", T_OBJECT, offsetof(TallyFields, taker), 0, NULL},
    {"arrived", T_OBJECT, offsetof(TallyFields, arrived), 0, NULL},
    {"serial", T_PYSSIZET, offsetof(TallyFields, serial), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef folding_members[] = {
    {"tally", T_OBJECT, offsetof(FoldingFields, tally), 0, NULL},
    {"generation", T_PYSSIZET, offsetof(FoldingFields, generation), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef receiver_members[] = {
    {"thread", T_OBJECT, offsetof(ReceiverFields, thread), 0, NULL},
    {"_folding", T_OBJECT, offsetof(ReceiverFields, folding), 0, NULL}, /* None until there is one */
    {"pass_number", T_PYSSIZET, offsetof(ReceiverFields, pass_number), 0, NULL},
    {"open", T_BOOL, offsetof(ReceiverFields, open), 0, NULL},
    {"between_passes", T_BOOL, offsetof(ReceiverFields, between_passes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define RECORD(of, holds, fields, title)                                                             \
    static PyType_Slot of##_record_slots[] = {                                                       \
        {Py_tp_members, of##_members},       {Py_tp_traverse, (void *)holds##_visit},                \
        {Py_tp_clear, (void *)holds##_drop}, {Py_tp_dealloc, (void *)holds##_free},                  \
        {0, NULL},                                                                                   \
    };                                                                                               \
    static PyType_Spec of##_record_spec = {                                                          \
        .name = "torchtap.reduce._native." title,                                                    \
        .basicsize = sizeof(fields),                                                                 \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,                      \
        .slots = of##_record_slots,                                                                  \
    }

RECORD(call, two, CallFields, "CallFields");
RECORD(entry, nothing, EntryFields, "EntryFields");
RECORD(tally, two, TallyFields, "TallyFields");
RECORD(folding, one, FoldingFields, "FoldingFields");
RECORD(receiver, two, ReceiverFields, "ReceiverFields");

/* Makes a type and adds it under its name. It is kept for good: its instances are asked for it. */
static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type ? PyModule_AddObjectRef(module, name, (PyObject *)*type) : -1;
}

static int add_records(PyObject *module)
{
    return add_type(module, "CallFields", &call_record_spec, &call_fields) < 0 ||
                   add_type(module, "EntryFields", &entry_record_spec, &entry_fields) < 0 ||
                   add_type(module, "TallyFields", &tally_record_spec, &tally_fields) < 0 ||
                   add_type(module, "FoldingFields", &folding_record_spec, &folding_fields) < 0 ||
                   add_type(module, "ReceiverFields", &receiver_record_spec, &receiver_fields) < 0
               ? -1
               : 0;
}
