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

/* An attribute that is written here. */
typedef struct {
    const char *key_field;
    size_t key_bytes;
    Value value;
} Attribute;

/* 1: taken, 0: not here, -1: an error. */
static int
take_attribute(PyObject *keys, PyObject *key, PyObject *value, Attribute *taken)
{
    PyObject *known = PyUnicode_CheckExact(key) ? PyDict_GetItemWithError(keys, key) : NULL;
    char *field = NULL;
    Py_ssize_t bytes = 0;
    if (known == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (PyBytes_AsStringAndSize(known, &field, &bytes) < 0) {
        return -1;
    }
    taken->key_field = field;
    taken->key_bytes = (size_t)bytes;
    return take_value(value, &taken->value)
           && taken->key_bytes + taken->value.bytes + MOST_EXTRA_BYTES <= BUFFER_BYTES;
}

static int
fits(const Attribute *taken, const unsigned char *at, const unsigned char *end)
{
    return taken->key_bytes + taken->value.bytes + MOST_EXTRA_BYTES <= (size_t)(end - at);
}

static unsigned char *
put_attribute(unsigned char *at, int tag, const Attribute *taken)
{
    const Value *value = &taken->value;
    size_t value_bytes = 1 + value->bytes;
    *at++ = (unsigned char)tag;
    at = put_varint(at, taken->key_bytes + 1 + varint_bytes(value_bytes) + value_bytes);
    memcpy(at, taken->key_field, taken->key_bytes);
    at += taken->key_bytes;
    *at++ = 0x12;
    at = put_varint(at, value_bytes);
    *at++ = value->tag;
    if (value->tag == 0x21) {
        memcpy(at, &value->number, 8);
        return at + 8;
    }
    at = put_varint(at, value->number);
    if (value->text != NULL) {
        memcpy(at, value->text, (size_t)value->number);
        at += value->number;
    }
    return at;
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
        Attribute taken;
        int here = take_attribute(keys, key, value, &taken);
        if (here < 0) {
            return NULL;
        }
        if (!here || !fits(&taken, at, buffer + BUFFER_BYTES)) {
            if (flush(parts, buffer, at) < 0) {
                return NULL;
            }
            at = buffer;
        }
        if (here) {
            at = put_attribute(at, tag, &taken);
            continue;
        }
        int result = add_by(pair, parts, key, value);
        if (result < 0) {
            return NULL;
        }
        dropped += result;
    }
    if (flush(parts, buffer, at) < 0) {
        return NULL;
    }
    return PyLong_FromLong(dropped);
}

/* Writes one of `told` at `*at`. 1: done, 0: not here, -1: an error. */
static int
put_told(PyObject *one, PyObject *records, PyObject *keys, int tag, unsigned char **at,
         const unsigned char *end)
{
    static PyObject *name;
    if (name == NULL) {
        name = PyUnicode_InternFromString("values");
    }
    if (name == NULL || !PyTuple_Check(one) || PyTuple_Size(one) != 4) {
        PyErr_SetString(PyExc_TypeError, "told takes tuples of four");
        return -1;
    }
    Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GetItem(one, 1));
    Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(one, 2));
    PyObject *record = PyErr_Occurred() ? NULL : PyList_GetItem(records, number);
    PyObject *values = record == NULL ? NULL : PyObject_GetAttr(record, name);
    if (values != NULL && !PyTuple_Check(values)) {
        PyErr_SetString(PyExc_TypeError, "values of a record are a tuple");
        Py_CLEAR(values);
    }
    PyObject *value = values == NULL ? NULL : PyTuple_GetItem(values, place);
    int result = value == NULL ? -1 : 0;
    if (value == Py_None) {
        result = PyObject_IsTrue(PyTuple_GetItem(one, 3)) == 0; /* nobody else has it */
    }
    else if (value != NULL) {
        Attribute taken;
        result = take_attribute(keys, PyTuple_GetItem(one, 0), value, &taken);
        if (result > 0 && fits(&taken, *at, end)) {
            *at = put_attribute(*at, tag, &taken);
        }
        else if (result > 0) {
            result = 0;
        }
    }
    Py_XDECREF(values);
    return result;
}

/* told_fields(records, told, tag, keys): for each group of `told` the fields of what it says, None
 * for those that are not for here. One of a group: key, number of a record, place among its values,
 * where else to look. */
PyObject *
module_told_fields(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *records, *told, *keys;
    int tag;
    if (!PyArg_ParseTuple(args, "O!O!iO!:told_fields", &PyList_Type, &records, &PyTuple_Type, &told,
                          &tag, &PyDict_Type, &keys)) {
        return NULL;
    }
    unsigned char buffer[BUFFER_BYTES];
    PyObject *fields = PyList_New(0);
    for (Py_ssize_t index = 0; fields != NULL && index < PyTuple_Size(told); index++) {
        PyObject *group = PyTuple_GetItem(told, index);
        unsigned char *at = buffer;
        int result = 1;
        if (!PyTuple_Check(group)) {
            PyErr_SetString(PyExc_TypeError, "told takes tuples of tuples");
            Py_CLEAR(fields);
            break;
        }
        for (Py_ssize_t place = 0; result > 0 && place < PyTuple_Size(group); place++) {
            PyObject *one = PyTuple_GetItem(group, place);
            result = put_told(one, records, keys, tag, &at, buffer + BUFFER_BYTES);
        }
        PyObject *field = NULL;
        if (result >= 0) {
            field = result ? PyBytes_FromStringAndSize((const char *)buffer, at - buffer)
                           : Py_NewRef(Py_None);
        }
        if (field == NULL || PyList_Append(fields, field) < 0) {
            Py_CLEAR(fields);
        }
        Py_XDECREF(field);
    }
    return fields;
}
