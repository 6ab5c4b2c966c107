/* What the parts of `pdtrace.native._compiled` share.
 *
 * Only the usual case is in C. Whatever is not usual (a value of a wrong type, a block that is full,
 * another thread, a closed ring, a damaged record) is left to the Python that does the same, before
 * anything was changed. No Python code runs in the middle of a change, so neither a signal handler
 * nor a finalizer nor another thread comes in between.
 *
 * Stable ABI of Python 3.11. Rings are little-endian, so is this.
 */

#ifndef PDTRACE_COMPILED_H
#define PDTRACE_COMPILED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rings need a little-endian machine"
#endif

/* pdtrace.ring.layout */
#define HEADER_BYTES 8 /* of a record: size | number << 16, checksum */
#define HEAD_BYTES 24  /* of a body: kind, 0, presence, attempt, key, t_ns */
#define MAX_STRING_BYTES 255
#define MAX_ATTRS 16 /* presence has a bit for each */

/* How the values of one mark stand behind its head; see pdtrace.ring.codec. */
typedef struct {
    PyObject_HEAD
    PyObject *mark;
    PyObject *checked; /* encodes or decodes in Python, for whatever is unusual */
    uint16_t fixed_bytes;
    uint8_t kind, count;
    char types[MAX_ATTRS]; /* q int, d float, ? bool, B str: its length, all bytes come last */
} Layout;

extern PyTypeObject *layout_type;

static inline size_t
type_size(char type)
{
    return type == 'q' || type == 'd' ? 8 : 1;
}

static inline Py_ssize_t
padded(Py_ssize_t size)
{
    return (size + 7) & ~(Py_ssize_t)7;
}

uint32_t crc32_of(const unsigned char *data, size_t size, uint32_t seed);
void make_crc_tables(void);

PyTypeObject *add_type(PyObject *module, PyType_Spec *spec);
void free_object(PyObject *self);

int add_recording(PyObject *module);

PyObject *module_scan(PyObject *module, PyObject *args);
PyObject *module_add_attributes(PyObject *module, PyObject *args);
PyObject *module_told_fields(PyObject *module, PyObject *args);

#endif
