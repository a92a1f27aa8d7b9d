/* From Python tensors to the norms of their rows, in one call. Included by _native.c.
 *
 * The arithmetic is that of `_rows.c`, which hands over its function (`use_row_sums`). Here is asked where the tensors lie,
 * and whether they lie alike; where not, nothing was read and Python sees to it. */

enum { FLOAT_DTYPES = BFLOAT16 + 1, MOST_OPERANDS = 5, MOST_SUMS = 5, ROW_NUMBERS = 2 + MOST_SUMS };

/* dtype, rows, width, operands, sums: what `_rows_kernel.h` calls sum_rows. */
typedef void (*RowSums)(int, size_t, size_t, const char *const *, double *);
static RowSums row_sums = NULL;

/* Tensors that are read beside each other, with their memory held. */
typedef struct {
    Memory of[MOST_OPERANDS];
    int count;
} Operands;

static void let_go_of(Operands *operands)
{
    for (int i = 0; i < operands->count; i++)
        Py_XDECREF(operands->of[i].storage);
}

/* Add an operand; 0 unless it is contiguous and its memory is there. */
static int one_more(Operands *operands, PyObject *value)
{
    Memory *memory = operands->of + operands->count;
    if (!is_plain(value) || !locate(value, memory))
        return 0;
    operands->count++;
    return memory->contiguous && memory->elements && memory->dimensions;
}

/* The last value stands for the next one, too. */
static int once_more(Operands *operands)
{
    operands->of[operands->count] = operands->of[operands->count - 1];
    Py_XINCREF(operands->of[operands->count++].storage);
    return 1;
}

/* Whether a tensor has these sizes, or with `cut` begins with a tensor of these sizes. */
static int begins_with(const Memory *memory, const Memory *like, int cut)
{
    if (memory->dtype != like->dtype || memory->dimensions != like->dimensions)
        return 0;
    for (int i = 1; i < like->dimensions; i++)
        if (memory->shape[i] != like->shape[i])
            return 0;
    return memory->shape[0] == like->shape[0] || (cut && memory->shape[0] > like->shape[0]);
}

/* Find the operands: `whole` values, the last of which says the sizes of all, and `ends` of one row each. */
static int find_operands(PyObject *const *values, int whole, int ends, int cut, Operands *found)
{
    for (int i = 0; i < whole + ends; i++)
        if (!(i && values[i] == values[i - 1] ? once_more(found) : one_more(found, values[i])))
            return 0;
    const Memory *like = found->of + whole - 1;
    if (like->dtype >= FLOAT_DTYPES)
        return 0;
    for (int i = 0; i < whole; i++)
        if (!begins_with(found->of + i, like, cut))
            return 0;
    for (int i = whole; i < whole + ends; i++)
        if (found->of[i].dtype != like->dtype || found->of[i].dimensions != 1 ||
            found->of[i].shape[0] != like->shape[like->dimensions - 1])
            return 0;
    return 1;
}

/* Rows, width and sums of what was found, into `row`. Lets go of the interpreter where that is worth it. */
static void sum_operands(const Operands *found, int whole, double *row)
{
    const Memory *like = found->of + whole - 1;
    const size_t width = (size_t)like->shape[like->dimensions - 1], rows = like->elements / width;
    const char *given[MOST_OPERANDS] = {0};
    double sums[MOST_SUMS] = {0};
    for (int i = 0; i < found->count; i++)
        given[i < whole ? i : i - whole + 3] = found->of[i].raw; /* ends have their places behind three tensors */
    if (like->elements * ITEM_BYTES[like->dtype] < RELEASE_BYTES)
        row_sums(like->dtype, rows, width, given, sums);
    else {
        Py_BEGIN_ALLOW_THREADS
        row_sums(like->dtype, rows, width, given, sums);
        Py_END_ALLOW_THREADS
    }
    row[0] = (double)rows;
    row[1] = (double)width;
    memcpy(row + 2, sums, sizeof(double) * (size_t)(whole == 2 ? 2 : found->count == whole ? 4 : 5));
}

/* Whether the sums of these values are in `row` now. */
static int fill_row(PyObject *const *values, int whole, int ends, int cut, double *row)
{
    Operands found;
    found.count = 0;
    const int done = row_sums && find_operands(values, whole, ends, cut, &found);
    if (done)
        sum_operands(&found, whole, row);
    let_go_of(&found);
    PyErr_Clear(); /* whatever it was: Python asks again, and says it */
    return done;
}

/* rows_into(address, cut, input, start_input, output, between, start[, bias, start_bias]): two rows of numbers, one for the
 * output and one for the input: how many rows these have, their width, and the sums that `_rows.sums` tells of. Values of the
 * start say the sizes; with `cut` the others may be longer, and their first rows count. Says what was done: 1 for the
 * output, 2 for the input, 3 for both. */
static PyObject *py_rows_into(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t numbers[2];
    (void)self;
    if ((nargs != 7 && nargs != 9) || !take_numbers(args, 2, 2, numbers)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "expected two numbers, and five or seven values");
        return NULL;
    }
    if (!numbers[0] || numbers[0] % (Py_ssize_t)sizeof(double)) {
        PyErr_Format(PyExc_ValueError, "no numbers can be written at %zd", numbers[0]);
        return NULL;
    }
    double *rows = (double *)numbers[0];
    const int cut = numbers[1] != 0, done = fill_row(args + 4, 3, (int)nargs - 7, cut, rows);
    return PyLong_FromLong(done | fill_row(args + 2, 2, 0, cut, rows + ROW_NUMBERS) << 1);
}

/* use_row_sums(capsule): the function of `_rows.c`. */
static PyObject *py_use_row_sums(PyObject *self, PyObject *capsule)
{
    (void)self;
    void *given = PyCapsule_GetPointer(capsule, "torchtap.reduce._rows.sum_rows");
    if (!given)
        return NULL;
    row_sums = (RowSums)given;
    Py_RETURN_NONE;
}
