/* Reading: the records of a block. The same in Python: `pdtrace.ring.reader`, `pdtrace.ring.codec`. */

#include "compiled.h"

/* One value of the type at `at`; a text is at `*tail`. NULL without an error: not here. */
static PyObject *
unpack_value(char type, const unsigned char *at, const unsigned char **tail,
             const unsigned char *end)
{
    if (type == 'q') {
        long long number;
        memcpy(&number, at, 8);
        return PyLong_FromLongLong(number);
    }
    if (type == 'd') {
        double number;
        memcpy(&number, at, 8);
        return PyFloat_FromDouble(number);
    }
    if (type == '?') {
        return PyBool_FromLong(*at != 0);
    }
    const unsigned char *text = *tail;
    if (*at > end - text) {
        return NULL;
    }
    *tail += *at;
    return PyUnicode_DecodeUTF8((const char *)text, *at, "replace");
}

/* The values behind the head of a body. NULL without an error: not here. */
static PyObject *
layout_values(const Layout *self, const unsigned char *body, size_t size)
{
    int bare = size == HEAD_BYTES;
    if (size < self->fixed_bytes && !bare) {
        return NULL;
    }
    PyObject *values = PyTuple_New(self->count);
    if (values == NULL) {
        return NULL;
    }
    const unsigned char *at = body + HEAD_BYTES, *tail = body + self->fixed_bytes;
    uint16_t present = 0;
    if (!bare) {
        memcpy(&present, body + 2, 2);
    }
    for (Py_ssize_t index = 0; index < self->count; index++) {
        PyObject *value = present >> index & 1
                              ? unpack_value(self->types[index], at, &tail, body + size)
                              : Py_NewRef(Py_None);
        if (value == NULL) {
            Py_DECREF(values);
            return NULL;
        }
        PyTuple_SetItem(values, index, value);
        at += type_size(self->types[index]);
    }
    return values;
}

/* The record in a body of HEAD_BYTES or more. NULL without an error: not here. */
static PyObject *
layout_record(const Layout *self, PyObject *made, const unsigned char *body, size_t size)
{
    uint32_t attempt;
    uint64_t key;
    int64_t t_ns;
    memcpy(&attempt, body + 4, 4);
    memcpy(&key, body + 8, 8);
    memcpy(&t_ns, body + 16, 8);
    PyObject *values = layout_values(self, body, size), *record = NULL;
    PyObject *fields = values == NULL ? NULL : PyTuple_New(5);
    if (fields != NULL) {
        PyTuple_SetItem(fields, 0, Py_NewRef(self->mark));
        PyTuple_SetItem(fields, 1, PyLong_FromUnsignedLongLong(key));
        PyTuple_SetItem(fields, 2, PyLong_FromUnsignedLong(attempt));
        PyTuple_SetItem(fields, 3, PyLong_FromLongLong(t_ns));
        PyTuple_SetItem(fields, 4, Py_NewRef(values));
        if (!PyErr_Occurred()) {
            record = PyObject_Call(made, fields, NULL);
        }
        Py_DECREF(fields);
    }
    Py_XDECREF(values);
    return record;
}

/* The record of an intact body. NULL without an error: not here. */
static PyObject *
decode(PyObject *decoder, PyObject *made, const unsigned char *body, size_t size)
{
    if (Py_IS_TYPE(decoder, layout_type)) {
        return layout_record((Layout *)decoder, made, body, size);
    }
    PyObject *copy = PyBytes_FromStringAndSize((const char *)body, (Py_ssize_t)size);
    if (copy == NULL) {
        return NULL;
    }
    PyObject *record = PyObject_CallFunctionObjArgs(decoder, copy, NULL);
    Py_DECREF(copy);
    return record;
}

/* scan(data, pos, number, decoders, records, made): appends the records from byte `pos` on, the first of
 * which has that number, up to one that is not intact or that cannot be decoded; where that is.
 * made  class of a mark's record: mark, key, attempt, t_ns, values */
PyObject *
module_scan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *decoders, *records, *made;
    const unsigned char *data;
    Py_ssize_t length, pos;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "y#nKO!O!O:scan", &data, &length, &pos, &number, &PyList_Type,
                          &decoders, &PyList_Type, &records, &made)) {
        return NULL;
    }
    while (pos >= 0 && pos <= length - HEADER_BYTES - HEAD_BYTES) {
        uint32_t low, checksum;
        memcpy(&low, data + pos, 4);
        memcpy(&checksum, data + pos + 4, 4);
        Py_ssize_t size = low & 0xFFFF;
        const unsigned char *body = data + pos + HEADER_BYTES;
        if (low >> 16 != (number & 0xFFFF) || size < HEADER_BYTES + HEAD_BYTES
            || size > length - pos
            || crc32_of(body, (size_t)size - HEADER_BYTES, (uint32_t)number) != checksum) {
            break;
        }
        PyObject *decoder = PyList_GetItem(decoders, body[0]);
        if (decoder == NULL) {
            return NULL;
        }
        if (decoder == Py_None) {
            break;
        }
        Py_INCREF(decoder);
        PyObject *record = decode(decoder, made, body, (size_t)size - HEADER_BYTES);
        Py_DECREF(decoder);
        if (record == NULL) {
            if (PyErr_Occurred()) {
                if (!PyErr_ExceptionMatches(PyExc_Exception)) {
                    return NULL;
                }
                PyErr_Clear();  /* it will be raised where it is handled */
            }
            break;
        }
        int appended = PyList_Append(records, record);
        Py_DECREF(record);
        if (appended < 0) {
            return NULL;
        }
        pos += padded(size);
        number++;
    }
    return Py_BuildValue("nK", pos, number);
}
