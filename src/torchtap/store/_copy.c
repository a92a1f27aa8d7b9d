/* A copy that does not go through the cache: for memory that nobody reads again soon.
 *
 * An ordinary store first fetches the line that it is about to overwrite, and the copy then pushes out of the cache what
 * the model needs next. Streaming stores do neither, so a copy costs one read, from the cache, and one write.
 *
 * Where the processor has no such stores, the module cannot be imported and torch's own copy is used.
 */

#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HAVE_STREAMING 1
#endif

#ifdef HAVE_STREAMING

#define LINE 64

__attribute__((target("avx2"))) static void stream(unsigned char *target, const unsigned char *source, size_t size)
{
    /* Streaming stores want their target aligned; sources are read as they come. */
    size_t head = (LINE - ((uintptr_t)target & (LINE - 1))) & (LINE - 1);
    if (head > size)
        head = size;
    memcpy(target, source, head);
    target += head;
    source += head;
    size -= head;
    for (; size >= 2 * LINE; target += 2 * LINE, source += 2 * LINE, size -= 2 * LINE) {
        __m256i parts[4];
        for (int part = 0; part < 4; part++)
            parts[part] = _mm256_loadu_si256((const __m256i *)(source + 32 * part));
        for (int part = 0; part < 4; part++)
            _mm256_stream_si256((__m256i *)(target + 32 * part), parts[part]);
    }
    memcpy(target, source, size);
    /* Streaming stores are seen by other threads in any order until this. */
    _mm_sfence();
}

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    unsigned long long target, source, size;
    if (!PyArg_ParseTuple(arguments, "KKK:copy", &target, &source, &size))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    stream((unsigned char *)(uintptr_t)target, (const unsigned char *)(uintptr_t)source, (size_t)size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source, size): so many bytes from one address to another."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_copy", "A copy past the cache.", -1, methods, NULL, NULL, NULL, NULL,
};

#endif

PyMODINIT_FUNC PyInit__copy(void)
{
#ifdef HAVE_STREAMING
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        return PyModule_Create(&definition);
#endif
    PyErr_SetString(PyExc_ImportError, "this processor has no streaming stores of 32 bytes");
    return NULL;
}
