/* Exporting: attributes as protobuf. The same in Python: `pdtrace.otlp.wire`. */

#include "compiled.h"

#define BUFFER_BYTES 4096
#define MOST_VARINT_BYTES 10
/* Around a key and a text: tag, length, tag, length, tag, length. */
#define MOST_EXTRA_BYTES (3 + 3 * MOST_VARINT_BYTES)

static size_t
varint_bytes(uint64_t number)
{
    size_t bytes = 1;
    for (; number > 127; number >>= 7) {
        bytes++;
    }
    return bytes;
}

static unsigned char *
put_varint(unsigned char *at, uint64_t number)
{
    for (; number > 127; number >>= 7) {
        *at++ = (unsigned char)(number & 127) | 128;
    }
    *at++ = (unsigned char)number;
    return at;
}

/* A value as it stands in an AnyValue: a tag, and 8 bytes, a varint or a text of so many bytes. */
typedef struct {
    unsigned char tag;
    uint64_t number;
    const char *text;
    size_t bytes;
} Value;

/* False: not here. */
static int
take_value(PyObject *value, Value *taken)
{
    taken->text = NULL;
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        taken->tag = 0x0A;
        taken->text = PyUnicode_AsUTF8AndSize(value, &size);
        if (taken->text == NULL) { /* a lone surrogate */
            PyErr_Clear();
            return 0;
        }
        taken->number = (uint64_t)size;
        taken->bytes = varint_bytes(taken->number) + (size_t)size;
        return 1;
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        taken->tag = 0x18;
        taken->number = (uint64_t)PyLong_AsLongLongAndOverflow(value, &overflow);
        taken->bytes = varint_bytes(taken->number);
        return !overflow;
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        taken->tag = 0x21;
        memcpy(&taken->number, &number, 8);
        taken->bytes = 8;
        return 1;
    }
    if (value == Py_True || value == Py_False) {
        taken->tag = 0x10;
        taken->number = value == Py_True;
        taken->bytes = 1;
        return 1;
    }
    return 0;
}

/* Appends what there is up to `end`, if anything. */
static int
flush(PyObject *parts, const unsigned char *begin, const unsigned char *end)
{
    if (begin == end) {
        return 0;
    }
    PyObject *piece = PyBytes_FromStringAndSize((const char *)begin, end - begin);
    if (piece == NULL) {
        return -1;
    }
    int appended = PyList_Append(parts, piece);
    Py_DECREF(piece);
    return appended;
}

/* Appends what `pair(key, value)` makes of an attribute. 1: it was left out, -1: an error. */
static int
add_by(PyObject *pair, PyObject *parts, PyObject *key, PyObject *value)
{
    Py_INCREF(key); /* for as long as that may change the attributes */
    Py_INCREF(value);
    PyObject *piece = PyObject_CallFunctionObjArgs(pair, key, value, NULL);
    Py_DECREF(key);
    Py_DECREF(value);
    if (piece == NULL) {
        return -1;
    }
    int result = piece == Py_None ? 1 : PyList_Append(parts, piece);
    Py_DECREF(piece);
    return result;
}

/* add_attributes(parts, attributes, tag, keys, pair): appends each attribute as a KeyValue field of
 * that tag to the list `parts`; how many were left out.
 * keys  the field of each key that may be written here; of others and of values that are no plain
 *       text or number `pair(key, value)` makes the bytes, or None */
PyObject *
module_add_attributes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *parts, *attributes, *keys, *pair, *key, *value;
    int tag;
    if (!PyArg_ParseTuple(args, "O!O!iO!O:add_attributes", &PyList_Type, &parts, &PyDict_Type,
                          &attributes, &tag, &PyDict_Type, &keys, &pair)) {
        return NULL;
    }
    unsigned char buffer[BUFFER_BYTES], *at = buffer;
    Py_ssize_t place = 0;
    long dropped = 0;
    while (PyDict_Next(attributes, &place, &key, &value)) {
        Value taken;
        char *key_field = NULL;
        Py_ssize_t key_bytes = 0;
        PyObject *known = PyUnicode_CheckExact(key) ? PyDict_GetItemWithError(keys, key) : NULL;
        if (known != NULL && PyBytes_AsStringAndSize(known, &key_field, &key_bytes) < 0) {
            return NULL;
        }
        int here = known != NULL && take_value(value, &taken)
                   && (size_t)key_bytes + taken.bytes + MOST_EXTRA_BYTES <= BUFFER_BYTES;
        if (!here || taken.bytes + (size_t)key_bytes + MOST_EXTRA_BYTES
                         > (size_t)(buffer + BUFFER_BYTES - at)) {
            if (flush(parts, buffer, at) < 0) {
                return NULL;
            }
            at = buffer;
        }
        if (!here) {
            int result = add_by(pair, parts, key, value);
            if (result < 0) {
                return NULL;
            }
            dropped += result;
            continue;
        }
        size_t value_bytes = 1 + taken.bytes;
        *at++ = (unsigned char)tag;
        at = put_varint(at, (uint64_t)key_bytes + 1 + varint_bytes(value_bytes) + value_bytes);
        memcpy(at, key_field, (size_t)key_bytes);
        at += key_bytes;
        *at++ = 0x12;
        at = put_varint(at, value_bytes);
        *at++ = taken.tag;
        if (taken.tag == 0x21) {
            memcpy(at, &taken.number, 8);
            at += 8;
            continue;
        }
        at = put_varint(at, taken.number);
        if (taken.text != NULL) {
            memcpy(at, taken.text, (size_t)taken.number);
            at += taken.number;
        }
    }
    if (PyErr_Occurred() || flush(parts, buffer, at) < 0) {
        return NULL;
    }
    return PyLong_FromLong(dropped);
}
