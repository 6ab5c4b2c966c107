/* Recording: a mark from the call to the ring. The same in Python: `pdtrace.ring.cursor` and
 * `pdtrace.marking`. */

#include "compiled.h"

#include <time.h>

#define MAX_BODY_BYTES 2048 /* that are packed here; a mark takes less */

static PyObject *system_clock; /* time.monotonic_ns */
static PyTypeObject *cursor_type;

/* -- Cursor: where the next record goes --------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer view;      /* the whole ring; buf is NULL once let go of */
    Py_ssize_t pos, end; /* of the room left in the block in writing */
    unsigned long long number;
    unsigned long owner; /* thread, 0 is nobody */
} Cursor;

/* Whether a record of `size` bytes, header included, may be written here and now. */
static int
cursor_has_room(const Cursor *self, Py_ssize_t size)
{
    return self->view.buf != NULL && self->owner == PyThread_get_thread_ident()
           && self->pos >= 0 && self->pos % 8 == 0 && size <= self->view.len
           && self->pos <= self->view.len - padded(size)
           && self->pos + padded(size) <= self->end;
}

static void
cursor_write(Cursor *self, const void *body, size_t size)
{
    char *record = (char *)self->view.buf + self->pos;
    unsigned long long number = self->number;
    uint64_t word = (uint64_t)(size + HEADER_BYTES) | (number & 0xFFFF) << 16
                    | (uint64_t)crc32_of(body, size, (uint32_t)number) << 32;
    self->pos += padded((Py_ssize_t)size + HEADER_BYTES);
    self->number = number + 1;
    memcpy(record + HEADER_BYTES, body, size);
    /* Last, and in one piece: until then there is no record for a reader. */
    __atomic_store_n((uint64_t *)record, word, __ATOMIC_RELEASE);
}

static int
cursor_init(Cursor *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", NULL};
    PyObject *buffer;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Cursor", names, &buffer)) {
        return -1;
    }
    PyBuffer_Release(&self->view);
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    if ((uintptr_t)self->view.buf % 8) {
        PyBuffer_Release(&self->view);
        PyErr_SetString(PyExc_ValueError, "a ring begins at a multiple of 8 bytes");
        return -1;
    }
    self->pos = self->end = 0;
    self->number = 0;
    self->owner = 0;
    return 0;
}

static PyObject *
cursor_let_go(Cursor *self, PyObject *Py_UNUSED(ignored))
{
    self->owner = 0;
    PyBuffer_Release(&self->view);
    Py_RETURN_NONE;
}

static PyObject *
cursor_append(Cursor *self, PyObject *body)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(body, &bytes, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    Py_ssize_t size = bytes.len + HEADER_BYTES;
    while (!cursor_has_room(self, size)) {
        PyObject *found;
        if (self->owner != PyThread_get_thread_ident()) {
            found = PyObject_CallMethod((PyObject *)self, "_take_ownership", NULL);
        }
        else {
            found = PyObject_CallMethod((PyObject *)self, "_make_room", "n", size);
        }
        if (found == NULL) {
            goto done;
        }
        int dropped = found == Py_False;
        Py_DECREF(found);
        if (dropped) {
            result = Py_NewRef(Py_None);
            goto done;
        }
    }
    cursor_write(self, bytes.buf, (size_t)bytes.len);
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&bytes);
    return result;
}

static int
cursor_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Cursor *)self)->view.obj);
    return 0;
}

static void
cursor_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    PyBuffer_Release(&((Cursor *)self)->view);
    free_object(self);
}

static PyMethodDef cursor_methods[] = {
    {"append", (PyCFunction)cursor_append, METH_O,
     PyDoc_STR("append($self, body, /)\n--\n\nAppend one record.")},
    {"let_go", (PyCFunction)cursor_let_go, METH_NOARGS,
     PyDoc_STR("let_go($self, /)\n--\n\nTouch the ring no more.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef cursor_members[] = {
    {"_pos", T_PYSSIZET, offsetof(Cursor, pos), 0, NULL},
    {"_end", T_PYSSIZET, offsetof(Cursor, end), 0, NULL},
    {"_number", T_ULONGLONG, offsetof(Cursor, number), 0, NULL},
    {"_owner", T_ULONG, offsetof(Cursor, owner), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot cursor_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("See pdtrace.ring.cursor.")},
    {Py_tp_init, cursor_init},
    {Py_tp_traverse, cursor_traverse},
    {Py_tp_dealloc, cursor_dealloc},
    {Py_tp_methods, cursor_methods},
    {Py_tp_members, cursor_members},
    {0, NULL},
};

static PyType_Spec cursor_spec = {
    "pdtrace.native._compiled.Cursor", sizeof(Cursor), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, cursor_slots,
};

/* -- values --------------------------------------------------------------------------------------- */

/* Packs one value at `at`; its text, if it is one, at `*tail`. False: not here. */
static int
pack_value(char type, PyObject *value, unsigned char *at, unsigned char **tail,
           const unsigned char *limit)
{
    if (type == 'q') {
        if (!PyLong_Check(value)) {
            return 0;
        }
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) {
            return 0;
        }
        memcpy(at, &number, 8);
        return 1;
    }
    if (type == 'B') {
        if (!PyUnicode_Check(value)) {
            return 0;
        }
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        if (text == NULL) {  /* a lone surrogate */
            PyErr_Clear();
            return 0;
        }
        if (size > MAX_STRING_BYTES || size > limit - *tail) {
            return 0;
        }
        *at = (unsigned char)size;
        memcpy(*tail, text, (size_t)size);
        *tail += size;
        return 1;
    }
    if (type == 'd') {
        if (!PyFloat_Check(value)) {
            return 0;
        }
        double number = PyFloat_AsDouble(value);
        memcpy(at, &number, 8);
        return 1;
    }
    if (value != Py_True && value != Py_False) {
        return 0;
    }
    *at = value == Py_True;
    return 1;
}

/* Packs the values behind the head of `body`, which is MAX_BODY_BYTES long, and says in `present`
 * which there are. Size of the body, 0: not here. */
static size_t
layout_pack(const Layout *self, PyObject *const *values, Py_ssize_t given, unsigned char *body,
             uint16_t *present)
{
    unsigned char *at = body + HEAD_BYTES, *tail = body + self->fixed_bytes;
    if (given > self->count) {
        return 0;
    }
    for (Py_ssize_t index = 0; index < self->count; index++) {
        char type = self->types[index];
        size_t size = type_size(type);
        if (index >= given || values[index] == Py_None) {
            memset(at, 0, size);
        }
        else if (pack_value(type, values[index], at, &tail, body + MAX_BODY_BYTES)) {
            *present |= (uint16_t)(1u << index);
        }
        else {
            return 0;
        }
        at += size;
    }
    return (size_t)(tail - body);
}

/* -- Marking: a mark, from the call to the ring ------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *cause, *encoders, *fail, *key, *now, *ring;
    unsigned int attempt;
} Marking;

/* The whole call in Python. `at_ns`: the clock's reading, if there was one. */
static PyObject *
mark_slowly(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
            PyObject *at_ns)
{
    PyObject *result = NULL, *keywords = NULL, *method = NULL;
    PyObject *values = PyTuple_New(nargs);
    if (values == NULL) {
        goto done;
    }
    for (Py_ssize_t index = 0; index < nargs; index++) {
        PyTuple_SetItem(values, index, Py_NewRef(args[index]));
    }
    keywords = PyDict_New();
    if (keywords == NULL) {
        goto done;
    }
    for (Py_ssize_t index = 0; kwnames != NULL && index < PyTuple_Size(kwnames); index++) {
        if (PyDict_SetItem(keywords, PyTuple_GetItem(kwnames, index), args[nargs + index]) < 0) {
            goto done;
        }
    }
    if (at_ns != NULL && PyDict_SetItemString(keywords, "at_ns", at_ns) < 0) {
        goto done;
    }
    method = PyObject_GetAttrString(self, "_mark_slowly");
    if (method != NULL) {
        result = PyObject_Call(method, values, keywords);
    }
done:
    Py_XDECREF(method);
    Py_XDECREF(keywords);
    Py_XDECREF(values);
    return result;
}

/* What the guard does with the error that is set. */
static PyObject *
report(Marking *self)
{
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception) || self->fail == NULL) {
        return NULL;
    }
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    PyObject *fail = Py_NewRef(self->fail);
    PyObject *result = PyObject_CallFunctionObjArgs(fail, error, NULL);
    Py_DECREF(fail);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    if (result == NULL) {
        return NULL;
    }
    Py_DECREF(result);
    Py_RETURN_NONE;
}

/* The clock's reading as an integer. NULL: it raised. */
static PyObject *
read_clock(Marking *self)
{
    if (self->now == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_now");
        return NULL;
    }
    PyObject *now = Py_NewRef(self->now);
    PyObject *at_ns = PyObject_CallNoArgs(now);
    Py_DECREF(now);
    return at_ns;
}

/* Whether a ring is one that is written here. */
static int
is_cursor(PyObject *ring)
{
    static PyTypeObject *known; /* to look it up among all bases touches too much memory */
    if (ring == NULL) {
        return 0;
    }
    if (Py_IS_TYPE(ring, known)) {
        return 1;
    }
    if (!PyObject_TypeCheck(ring, cursor_type)) {
        return 0;
    }
    PyTypeObject *before = known;
    known = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(ring));
    Py_XDECREF((PyObject *)before);
    return 1;
}

/* What `at_ns` says in nanoseconds. False: nothing that could be recorded. */
static int
nanoseconds(PyObject *at_ns, long long *t_ns)
{
    int overflow = 0;
    if (!PyLong_Check(at_ns)) {
        return 0;
    }
    *t_ns = PyLong_AsLongLongAndOverflow(at_ns, &overflow);
    return !overflow;
}

/* Records the mark. False: not here, and nothing has changed. */
static int
record_mark(Marking *self, PyObject *const *args, Py_ssize_t nargs, long long t_ns)
{
    unsigned char body[MAX_BODY_BYTES];
    if (!PyLong_Check(args[0]) || self->encoders == NULL || !PyList_Check(self->encoders)
        || !is_cursor(self->ring) || self->key == NULL || !PyLong_Check(self->key)) {
        return 0;
    }
    int overflow;
    long mark = PyLong_AsLongAndOverflow(args[0], &overflow);
    if (overflow || mark < 0 || mark >= PyList_Size(self->encoders)) {
        return 0;
    }
    PyObject *encoder = PyList_GetItem(self->encoders, mark);
    if (!Py_IS_TYPE(encoder, layout_type)) {
        return 0;  /* not a mark of this role, or one that leaves its values out */
    }
    uint16_t present = 0;
    size_t size = HEAD_BYTES;
    if (nargs > 1) {
        size = layout_pack((Layout *)encoder, args + 1, nargs - 1, body, &present);
        if (size == 0) {
            return 0;
        }
    }
    uint64_t key = PyLong_AsUnsignedLongLong(self->key);
    if (key == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    Cursor *ring = (Cursor *)self->ring;
    if (!cursor_has_room(ring, (Py_ssize_t)size + HEADER_BYTES)) {
        return 0;
    }
    uint32_t attempt = self->attempt;
    int64_t time_ns = t_ns;
    body[0] = ((Layout *)encoder)->kind;
    body[1] = 0;
    memcpy(body + 2, &present, 2);
    memcpy(body + 4, &attempt, 4);
    memcpy(body + 8, &key, 8);
    memcpy(body + 16, &time_ns, 8);
    cursor_write(ring, body, size);
    return 1;
}

static PyObject *
marking_mark(Marking *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *given = Py_None, *read = NULL, *result;
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_Size(kwnames);
    if (nargs < 1 || keywords > 1
        || (keywords == 1
            && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(kwnames, 0), "at_ns") != 0)) {
        return mark_slowly((PyObject *)self, args, nargs, kwnames, NULL);
    }
    if (keywords == 1) {
        given = args[nargs];
    }
    PyObject *cause = self->cause;
    self->cause = Py_NewRef(Py_None);
    Py_XDECREF(cause);

    long long t_ns;
    int known = 1;
    if (given != Py_None) {
        known = nanoseconds(given, &t_ns);
    }
#ifdef __linux__  /* where Python's clock is this one */
    else if (self->now == system_clock) {
        struct timespec now;
        known = clock_gettime(CLOCK_MONOTONIC, &now) == 0;
        t_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    }
#endif
    else {
        read = read_clock(self);
        if (read == NULL) {
            return report(self);
        }
        known = nanoseconds(read, &t_ns);
    }
    if (known && record_mark(self, args, nargs, t_ns)) {
        result = Py_NewRef(Py_None);
    }
    else {
        result = mark_slowly((PyObject *)self, args, nargs, kwnames, read);
    }
    Py_XDECREF(read);
    return result;
}

static int
marking_traverse(PyObject *object, visitproc visit, void *arg)
{
    Marking *self = (Marking *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->cause);
    Py_VISIT(self->encoders);
    Py_VISIT(self->fail);
    Py_VISIT(self->key);
    Py_VISIT(self->now);
    Py_VISIT(self->ring);
    return 0;
}

static int
marking_clear(PyObject *object)
{
    Marking *self = (Marking *)object;
    Py_CLEAR(self->cause);
    Py_CLEAR(self->encoders);
    Py_CLEAR(self->fail);
    Py_CLEAR(self->key);
    Py_CLEAR(self->now);
    Py_CLEAR(self->ring);
    return 0;
}

static void
marking_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    marking_clear(self);
    free_object(self);
}

static PyMethodDef marking_methods[] = {
    {"mark", (PyCFunction)(void (*)(void))marking_mark, METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("mark($self, mark, /, *values, at_ns=None)\n--\n\n"
               "Record an instant; see pdtrace.marking.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef marking_members[] = {
    {"_attempt", T_UINT, offsetof(Marking, attempt), 0, NULL},
    {"_cause", T_OBJECT_EX, offsetof(Marking, cause), 0, NULL},
    {"_encoders", T_OBJECT_EX, offsetof(Marking, encoders), 0, NULL},
    {"_fail", T_OBJECT_EX, offsetof(Marking, fail), 0, NULL},
    {"_now", T_OBJECT_EX, offsetof(Marking, now), 0, NULL},
    {"key", T_OBJECT_EX, offsetof(Marking, key), 0, NULL},
    {"ring", T_OBJECT_EX, offsetof(Marking, ring), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot marking_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("See pdtrace.marking.")},
    {Py_tp_traverse, marking_traverse},
    {Py_tp_clear, marking_clear},
    {Py_tp_dealloc, marking_dealloc},
    {Py_tp_methods, marking_methods},
    {Py_tp_members, marking_members},
    {0, NULL},
};

static PyType_Spec marking_spec = {
    "pdtrace.native._compiled.Marking", sizeof(Marking), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, marking_slots,
};

int
add_recording(PyObject *module)
{
    PyObject *time = PyImport_ImportModule("time");
    if (time == NULL) {
        return -1;
    }
    system_clock = PyObject_GetAttrString(time, "monotonic_ns");
    Py_DECREF(time);
    cursor_type = system_clock == NULL ? NULL : add_type(module, &cursor_spec);
    if (cursor_type == NULL || add_type(module, &marking_spec) == NULL) {
        return -1;
    }
    return 0;
}
