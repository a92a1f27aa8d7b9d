/* zlib's crc32 at the speed of memory: 64 or 128 bytes are folded at once by carry-less multiplication.
 *
 * A message is a polynomial over two elements; its crc is the remainder of dividing it by POLYNOMIAL. Four lanes of 128
 * bits hold a message that has the same remainder as all that was read so far. To move a lane 512 bits ahead it is
 * multiplied by x^512, of which only the remainder matters, and that has 32 bits; so one multiplication for each
 * half of the lane will do. What is left in the end, 16 bytes, and whatever follows them, goes through a table.
 * Processors that multiply two lanes with one instruction have eight of them and move them 1024 bits ahead.
 *
 * The same numbers as zlib.crc32 for every input (a test holds that). Where the processor lacks the instruction, the module
 * cannot be imported; zlib's own and torch's copy are used.
 *
 * `copy` takes the checksum of bytes while it copies them, which costs nothing: memory is slower. It is the checksum of
 * what was written, also where somebody changes the source meanwhile. The copy goes past the
 * cache. An ordinary store first fetches the line that it is about to overwrite, and the copy then pushes out of the cache
 * what the model needs next. Streaming stores do neither, so a copy costs one read, from the cache, and one write.
 */

#include <Python.h>

#include "_checksum_kernel.h"

#define RELEASE_BYTES (1 << 16)

static PyObject *crc32(PyObject *module, PyObject *arguments)
{
    Py_buffer buffer;
    unsigned int value = 0;
    if (!PyArg_ParseTuple(arguments, "y*|I:crc32", &buffer, &value))
        return NULL;
    uint32_t result;
    if (buffer.len > RELEASE_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        result = crc32_of(value, buffer.buf, (size_t)buffer.len);
        Py_END_ALLOW_THREADS
    } else {
        result = crc32_of(value, buffer.buf, (size_t)buffer.len);
    }
    PyBuffer_Release(&buffer);
    return PyLong_FromUnsignedLong(result);
}

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    unsigned long long target, source, size;
    if (!PyArg_ParseTuple(arguments, "KKK:copy", &target, &source, &size))
        return NULL;
    if (size && (!target || !source)) {
        PyErr_Format(PyExc_ValueError, "no %llu bytes can be copied from %llu to %llu", size, source, target);
        return NULL;
    }
    uint32_t result;
    Py_BEGIN_ALLOW_THREADS
    result = copy_of((unsigned char *)(uintptr_t)target, (const unsigned char *)(uintptr_t)source, (size_t)size);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(result);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source, size): bytes from one address to another; returns their crc32."},
    {"crc32", crc32, METH_VARARGS, "crc32(data, value=0): the same as zlib.crc32."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_checksum", "A fast crc32.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__checksum(void)
{
    if (prepare())
        return PyModule_Create(&definition);
    PyErr_SetString(PyExc_ImportError, "this processor has no carry-less multiplication");
    return NULL;
}
