/* The module, the checksum of records and how the values of a mark are laid out. */

#include "compiled.h"

/* -- checksum ----------------------------------------------------------------------------------- */

/* CRC-32 as zlib has it, four bits of each of eight bytes at a time. The usual tables are 1 to 8 KiB of bytes:
 * between other work they are out of the cache, and loading them takes longer than this. */
static uint32_t crc_tables[16][16];

void
make_crc_tables(void)
{
    for (uint32_t nibble = 0; nibble < 16; nibble++) {
        uint32_t crc = nibble;
        for (int table = 15; table >= 0; table--) {
            for (int bit = 0; bit < 4; bit++) {
                crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1)));
            }
            crc_tables[table][nibble] = crc;
        }
    }
}

static uint32_t
crc_of_word(uint32_t word, uint32_t tables[8][16])
{
    return tables[0][word & 15] ^ tables[1][word >> 4 & 15] ^ tables[2][word >> 8 & 15]
           ^ tables[3][word >> 12 & 15] ^ tables[4][word >> 16 & 15] ^ tables[5][word >> 20 & 15]
           ^ tables[6][word >> 24 & 15] ^ tables[7][word >> 28];
}

uint32_t
crc32_of(const unsigned char *data, size_t size, uint32_t seed)
{
    uint32_t crc = ~seed;
    for (; size >= 8; data += 8, size -= 8) {
        uint32_t words[2];
        memcpy(words, data, 8);
        crc = crc_of_word(words[0] ^ crc, crc_tables) ^ crc_of_word(words[1], crc_tables + 8);
    }
    for (; size; data++, size--) {
        crc ^= *data;
        crc = crc >> 4 ^ crc_tables[15][crc & 15];
        crc = crc >> 4 ^ crc_tables[15][crc & 15];
    }
    return ~crc;
}

/* -- Layout ------------------------------------------------------------------------------------- */

PyTypeObject *layout_type;

static int
layout_init(Layout *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"mark", "types", "checked", NULL};
    PyObject *mark, *checked;
    const char *types;
    Py_ssize_t count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!s#O:Layout", names, &PyLong_Type, &mark,
                                     &types, &count, &checked)) {
        return -1;
    }
    long kind = PyLong_AsLong(mark);
    if (self->mark != NULL || kind < 0 || kind > 255 || count > MAX_ATTRS
        || strspn(types, "qd?B") != (size_t)count) {
        PyErr_SetString(PyExc_ValueError,
                        "a layout is made once, of a mark and at most 16 types out of q, d, ?, B");
        return -1;
    }
    self->fixed_bytes = HEAD_BYTES;
    for (Py_ssize_t index = 0; index < count; index++) {
        self->types[index] = types[index];
        self->fixed_bytes += (uint16_t)type_size(types[index]);
    }
    self->kind = (uint8_t)kind;
    self->count = (uint8_t)count;
    self->mark = Py_NewRef(mark);
    self->checked = Py_NewRef(checked);
    return 0;
}

static PyObject *
layout_call(Layout *self, PyObject *args, PyObject *kwargs)
{
    if (self->checked == NULL) {
        PyErr_SetString(PyExc_TypeError, "a layout that was not made");
        return NULL;
    }
    return PyObject_Call(self->checked, args, kwargs);
}

static int
layout_traverse(Layout *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->mark);
    Py_VISIT(self->checked);
    return 0;
}

static int
layout_clear(Layout *self)
{
    Py_CLEAR(self->mark);
    Py_CLEAR(self->checked);
    return 0;
}

static void
layout_dealloc(Layout *self)
{
    PyObject_GC_UnTrack(self);
    layout_clear(self);
    free_object((PyObject *)self);
}

static PyType_Slot layout_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Values of one mark as bytes; see pdtrace.ring.codec.")},
    {Py_tp_init, layout_init},
    {Py_tp_call, layout_call},
    {Py_tp_traverse, layout_traverse},
    {Py_tp_clear, layout_clear},
    {Py_tp_dealloc, layout_dealloc},
    {0, NULL},
};

static PyType_Spec layout_spec = {
    "pdtrace.native._compiled.Layout", sizeof(Layout), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, layout_slots,
};

/* -- the module --------------------------------------------------------------------------------- */

void
free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

PyTypeObject *
add_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddType(module, type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}

static PyObject *
module_crc32(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    unsigned long long seed = 0;
    if (!PyArg_ParseTuple(args, "y*|K:crc32", &data, &seed)) {
        return NULL;
    }
    uint32_t crc = crc32_of(data.buf, (size_t)data.len, (uint32_t)seed);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef module_methods[] = {
    {"add_attributes", module_add_attributes, METH_VARARGS,
     PyDoc_STR("add_attributes(parts, attributes, tag, keys, pair, /)\n--\n\n"
               "Append attributes as fields; see pdtrace.otlp.wire.")},
    {"crc32", module_crc32, METH_VARARGS,
     PyDoc_STR("crc32(data, seed=0, /)\n--\n\nThe checksum of records, as zlib.crc32 has it.")},
    {"scan", module_scan, METH_VARARGS,
     PyDoc_STR("scan(data, pos, number, decoders, records, made, /)\n--\n\n"
               "Append the records from byte `pos` on; see pdtrace.ring.reader.")},
    {"told_fields", module_told_fields, METH_VARARGS,
     PyDoc_STR("told_fields(records, told, tag, keys, /)\n--\n\n"
               "Fields of what marks say; see pdtrace.otlp.wire.")},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pdtrace.native._compiled",
    .m_doc = "The hot paths of recording, reading and exporting in C; see pdtrace.native.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC
PyInit__compiled(void)
{
    make_crc_tables();
    PyObject *module = PyModule_Create(&module_def);
    if (module == NULL) {
        return NULL;
    }
    layout_type = add_type(module, &layout_spec);
    if (layout_type == NULL || add_recording(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
