/* Every sum that the distance of two stretches of memory needs, from one read of both.
 *
 * No torch headers: it is handed two addresses, a number for each dtype and a count, so that one build serves every
 * torch. It guarantees:
 * - sums are in double precision, blocks of them added up one after the other;
 * - places where either side is not finite are counted and left out of every sum;
 * - the interpreter lock is released while it reads.
 *
 * Not here: which memory may be read (reduce/densify.py vouches for it), what follows from the sums.
 */

#include <Python.h>

#include "_distance_kernel.h"

/* sums(reference address, dtype, target address, dtype, count, atol, rtol, ulp scale, ulp floor, ulp whole) */
static PyObject *py_sums(PyObject *self, PyObject *arguments)
{
    (void)self;
    unsigned long long reference, target, count;
    int left, right, whole;
    Terms terms;
    if (!PyArg_ParseTuple(arguments, "KiKiKddddi", &reference, &left, &target, &right, &count, &terms.atol,
                          &terms.rtol, &terms.ulp_scale, &terms.ulp_floor, &whole))
        return NULL;
    if (left < 0 || left >= DTYPES || right < 0 || right >= DTYPES) {
        PyErr_SetString(PyExc_ValueError, "unknown dtype");
        return NULL;
    }
    terms.ulp_mask = whole ? 0 : EXPONENT;
    if ((count && (!reference || !target)) || reference % ITEM_BYTES[left] || target % ITEM_BYTES[right]) {
        PyErr_Format(PyExc_ValueError, "no memory of %llu elements begins at %llu and at %llu", count, reference, target);
        return NULL;
    }
    Sums sums;
    Py_BEGIN_ALLOW_THREADS
    measure(left, (const char *)(uintptr_t)reference, right, (const char *)(uintptr_t)target, (size_t)count, &terms,
            &sums);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(ddddddddddddd)(LLLLL)(LLLL)i", sums.rr, sums.tt, sums.tr, sums.dd, sums.sum_abs,
                         sums.sum_rel, sums.sum_ulp, sums.max_abs, sums.max_rel, sums.max_ulp, sums.absmax,
                         sums.worst_reference, sums.worst_target, (long long)sums.compared, (long long)sums.unequal,
                         (long long)sums.within, (long long)sums.masks_differ, (long long)sums.worst,
                         (long long)sums.nans[0], (long long)sums.nans[1], (long long)sums.infs[0],
                         (long long)sums.infs[1], sums.exponent);
}

static PyMethodDef methods[] = {
    {"sums", py_sums, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_distance",
    .m_doc = "The sums of the distance of two stretches of memory; for torchtap.comparison.measures alone.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__distance(void)
{
    return PyModuleDef_Init(&definition);
}
