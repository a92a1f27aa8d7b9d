/* From a Python tensor to its memory, and how to know it again. Included by _native.c.
 *
 * A tensor tells its address, sizes and strides through DLPack's exchange interface: function pointers of a fixed layout
 * that torch hands out, so that still no header of torch is needed. What `memory.located` vouches for is asked here,
 * question by question; a tensor that fails one is left to Python, and nothing of it was read.
 *
 * The last few tensors are remembered by identity and version (`Marks`), not held. */

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

#define PLAIN 4 /* the types of tensors that are what they seem */

/* What is the same for all of them, set once by `use_tensors`. */
static const Exchange *exchange = NULL;
static PyObject *plain_types[PLAIN];
static PyObject *name_version;

/* Methods of no arguments, of a plain tensor and of its storage, as the C functions that they are. Between two hooks a
 * model's own code takes the caches: each name that is not looked up is memory that is not fetched. */
enum { IS_NEG, IS_INFERENCE, STORAGE, BEGIN, QUESTIONS };
static PyCFunction questions[QUESTIONS];
static PyTypeObject *storage_type; /* whose method the last one is; its length is in bytes */

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

/* A number that a method answers with; -1 where it raised, with the error set. */
static long long ask_number(PyObject *of, int question)
{
    PyObject *answer = questions[question](of, NULL);
    if (!answer)
        return -1;
    const long long number = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return number;
}

/* 1, 0, or -1 with the error set. */
static int ask_whether(PyObject *of, int question)
{
    PyObject *answer = questions[question](of, NULL);
    if (!answer)
        return -1;
    const int is_true = answer == Py_True;
    Py_DECREF(answer);
    return is_true;
}

/* How often a tensor was changed in place; -1 where nothing tells (inference tensors keep no version). */
static long long version_of(PyObject *tensor)
{
    if (ask_whether(tensor, IS_INFERENCE) != 0)
        return -1;
    PyObject *version = PyObject_GetAttr(tensor, name_version);
    if (!version)
        return -1;
    const long long number = PyLong_AsLongLong(version);
    Py_DECREF(version);
    return number;
}

/* The last few tensors that were seen. */
#define RECENT 4

typedef struct {
    int next;
    struct {
        PyObject *tensor; /* only an identity: it may be gone */
        PyObject *reference;
        long long version; /* below zero: nothing is remembered */
    } of[RECENT];
} Marks;

/* The place of this very tensor, if it was not changed since; -1 where it has none. */
static int find_mark(const Marks *marks, PyObject *tensor, long long version)
{
    for (int i = 0; i < RECENT; i++) {
        if (marks->of[i].tensor != tensor || marks->of[i].version != version || version < 0)
            continue;
        PyObject *alive = PyObject_CallNoArgs(marks->of[i].reference);
        Py_XDECREF(alive); /* the caller holds it too */
        if (alive == tensor)
            return i;
        PyErr_Clear();
    }
    return -1;
}

/* A place for a tensor. Without a version, or where it cannot be referred to, there is nothing to know it by: -1. */
static int set_mark(Marks *marks, PyObject *tensor, long long version)
{
    PyObject *reference = version < 0 ? NULL : PyWeakref_NewRef(tensor, NULL);
    if (!reference) {
        PyErr_Clear();
        return -1;
    }
    int place = marks->next;
    for (int i = 0; i < RECENT; i++)
        if (marks->of[i].tensor == tensor)
            place = i;
    if (place == marks->next)
        marks->next = (place + 1) % RECENT;
    PyObject *before = marks->of[place].reference;
    marks->of[place].tensor = tensor;
    marks->of[place].reference = reference;
    marks->of[place].version = version;
    Py_XDECREF(before);
    return place;
}

static void forget_marks(Marks *marks)
{
    for (int i = 0; i < RECENT; i++) {
        PyObject *before = marks->of[i].reference;
        marks->of[i].reference = NULL;
        marks->of[i].tensor = NULL;
        marks->of[i].version = -1;
        Py_XDECREF(before);
    }
}

/* What a value's memory is: contiguous, or a layout to gather by. */
typedef struct {
    const char *raw;
    size_t elements;
    const int64_t *shape; /* the tensor's own */
    int dimensions, dtype, contiguous;
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
    PyObject *storage = questions[STORAGE](tensor, NULL);
    if (!storage)
        return 0;
    const int known = Py_TYPE(storage) == storage_type;
    const long long begin = known ? ask_number(storage, BEGIN) : -1, size = known ? PyObject_Size(storage) : -1;
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
    if (ask_whether(tensor, IS_NEG) != 0 || exchange->look(tensor, &dl) != 0)
        return 0;
    if (dl.device.type != ON_CPU || (memory->dtype = dl_dtype(&dl)) < 0)
        return 0;
    const Py_ssize_t reach = take_layout(&dl, memory);
    if (reach < 0)
        return 0;
    memory->raw = (const char *)dl.data + dl.offset;
    memory->shape = dl.shape;
    memory->dimensions = dl.dimensions;
    if (!reach)
        return 1;
    const size_t item = ITEM_BYTES[memory->dtype];
    return (uintptr_t)memory->raw % item == 0 && storage_reaches(tensor, memory, (size_t)reach * item);
}

static int is_plain(PyObject *tensor)
{
    for (int i = 0; i < PLAIN; i++)
        if ((PyObject *)Py_TYPE(tensor) == plain_types[i])
            return exchange != NULL;
    return 0;
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

static int name_questions(void)
{
    name_version = PyUnicode_InternFromString("_version");
    return !PyErr_Occurred();
}

/* The C functions of bound methods; 0 where one is of another kind, and nothing was taken. */
static int take_questions(PyObject *methods)
{
    PyCFunction found[QUESTIONS];
    if (PyTuple_Size(methods) != QUESTIONS)
        return 0;
    for (int i = 0; i < QUESTIONS; i++) {
        PyObject *method = PyTuple_GetItem(methods, i);
        if (Py_TYPE(method) != &PyCFunction_Type || PyCFunction_GetFlags(method) != METH_NOARGS)
            return 0;
        found[i] = PyCFunction_GetFunction(method);
    }
    memcpy(questions, found, sizeof(found));
    storage_type = Py_TYPE(PyCFunction_GetSelf(PyTuple_GetItem(methods, BEGIN)));
    Py_INCREF((PyObject *)storage_type); /* for good, as all of this */
    return 1;
}

/* use_tensors(exchange, types, methods): the capsule that gives the memory of tensors of these types, and further methods
 * in the order of `questions`. Returns False if this build of torch has others. */
static PyObject *py_use_tensors(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 3 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) > PLAIN || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected a capsule, a few types and their methods");
        return NULL;
    }
    const Exchange *given = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (!given)
        return NULL;
    while (given && given->version.major > 1)
        given = given->older;
    if (!given || given->version.major != 1 || !given->look || !take_questions(args[2]))
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args[1]); i++) {
        PyObject *type = PyTuple_GetItem(args[1], i);
        Py_INCREF(type); /* for good: they are torch's own */
        plain_types[i] = type;
    }
    exchange = given;
    Py_RETURN_TRUE;
}
