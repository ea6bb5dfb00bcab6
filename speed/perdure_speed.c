/* The inner loops of Perdure: copying remembered messages and comparing messages with them, for its LangGraph saver;
 * comparing two texts and looking for values that JSON cannot hold, for every save; products of vectors, for searches.
 *
 * All do what src/perdure/langgraph/columns.py, values/diff.py, values/plain.py and memory/segments.py do in Python,
 * which is used where this module is not installed; the same tests run on both. What is remembered of a message: its
 * class (`kinds`), a private copy of its fields (`fields`: a dict of plain values), the names of the fields that were
 * set (`names`: a set), and whether its class keeps values beside the fields (`extras`: an empty dict or None). Plain values are None, bool, int, float, str, and
 * lists and dicts (with keys of type str) of these, of exactly these types, nested no deeper than Perdure's codec
 * allows: recursion follows what is remembered, never what a program hands in.
 *
 * Apart from one comparison no Python code runs in here, and no other thread but beside the products of vectors, which
 * touch no object: this module holds the GIL otherwise.
 * So nothing has to be owned while it is used. Collections call finalizers, which are Python code: the garbage collector
 * is off while objects are made, and on again before any other code of the process runs. The exception is the
 * comparison of two sets: a program may have filled one of them with names that compare by Python code. References are
 * not counted while messages are compared, because counting writes to them: LangGraph stores in another thread, and
 * what one processor has written the other has to fetch.
 *
 * Messages are made without `__init__`, as in Python: a pydantic model is a `__dict__` and three slots. Like every
 * object that Python makes they are tracked by the garbage collector.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <math.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "perdure-speed needs a Python with a GIL; without it Perdure does the same in Python"
#endif

static PyTypeObject *base_model; /* pydantic's, and where an instance has its slots; NULL until `attach` */
static Py_ssize_t set_offset, extra_offset, private_offset;

#define SLOT(object, offset) (*(PyObject **)((char *)(object) + (offset)))

/* Objects of a long list are rarely in the processor's cache, and each would be waited for by itself. So those that come
 * soon are asked for: an object this far ahead, what it refers to at half of that, and so on. */
#define AHEAD 16
#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)(address))
#endif
#define LINE_BYTES 64

/* ---- copying */

/* A plain value that the caller owns: the same object if it cannot be changed, a copy all the way down if it can. */
static PyObject *
fresh(PyObject *value)
{
    if (PyDict_CheckExact(value)) {
        PyObject *made = PyDict_New();
        PyObject *key, *item;
        Py_ssize_t position = 0;
        while (made != NULL && PyDict_Next(value, &position, &key, &item)) {
            PyObject *copied = fresh(item);
            if (copied == NULL || PyDict_SetItem(made, key, copied) < 0)
                Py_CLEAR(made);
            Py_XDECREF(copied);
        }
        return made;
    }
    if (PyList_CheckExact(value)) {
        Py_ssize_t size = PyList_GET_SIZE(value);
        PyObject *made = PyList_New(size);
        for (Py_ssize_t at = 0; made != NULL && at < size; at++) {
            PyObject *copied = fresh(PyList_GET_ITEM(value, at));
            if (copied == NULL)
                Py_CLEAR(made);
            else
                PyList_SET_ITEM(made, at, copied);
        }
        return made;
    }
    return Py_NewRef(value);
}

/* The dict of a new message. PyDict_Copy of a dict that shares its keys is one allocation and a loop over pointers. */
static PyObject *
fresh_fields(PyObject *fields)
{
    PyObject *made = PyDict_Copy(fields);
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (made != NULL && PyDict_Next(fields, &position, &key, &value)) {
        if (!PyDict_CheckExact(value) && !PyList_CheckExact(value))
            continue;
        PyObject *copied = fresh(value);
        if (copied == NULL || PyDict_SetItem(made, key, copied) < 0)
            Py_CLEAR(made);
        Py_XDECREF(copied);
    }
    return made;
}

/* What is remembered of one message, borrowed. */
typedef struct {
    PyTypeObject *kind;
    PyObject *fields, *names, *extra;
} Row;

static PyObject *
message(const Row *row)
{
    PyObject *fields = fresh_fields(row->fields);
    PyObject *names = fields == NULL ? NULL : PySet_New(row->names);
    PyObject *extra = names == NULL ? NULL : row->extra == Py_None ? Py_NewRef(Py_None) : PyDict_New();
    PyObject *made = extra == NULL ? NULL : row->kind->tp_alloc(row->kind, 0);
    if (made == NULL || PyObject_GenericSetDict(made, fields, NULL) < 0) {
        Py_XDECREF(names);
        Py_XDECREF(extra);
        Py_CLEAR(made);
    }
    else {
        SLOT(made, set_offset) = names; /* they were NULL: tp_alloc gives zeroed memory */
        SLOT(made, extra_offset) = extra;
        SLOT(made, private_offset) = Py_NewRef(Py_None);
    }
    Py_XDECREF(fields);
    return made;
}

/* ---- comparing */

/* Whether a value is what is remembered of it: of the same types and in the same order all the way down, so that its
 * text is the same. `alone`: and whether nothing else refers to a list or dict in it. 1, 0, or -1 with an exception.
 * Runs no Python code: only built-in types are compared. */
static int
same(PyObject *remembered, PyObject *value, int alone)
{
    if (remembered == value)
        return 1; /* what can be changed is private: it is never the same object */
    PyTypeObject *type = Py_TYPE(remembered);
    if (type != Py_TYPE(value))
        return 0;
    if (type == &PyUnicode_Type || type == &PyLong_Type)
        return PyObject_RichCompareBool(remembered, value, Py_EQ);
    if (type == &PyDict_Type) {
        PyObject *key, *item, *other_key, *other;
        Py_ssize_t position = 0, other_position = 0;
        if (PyDict_GET_SIZE(remembered) != PyDict_GET_SIZE(value) || (alone && Py_REFCNT(value) != 1))
            return 0;
        while (PyDict_Next(remembered, &position, &key, &item)) {
            if (!PyDict_Next(value, &other_position, &other_key, &other))
                return 0;
            int equal = same(key, other_key, alone);
            if (equal == 1)
                equal = same(item, other, alone);
            if (equal != 1)
                return equal;
        }
        return 1;
    }
    if (type == &PyList_Type) {
        if (PyList_GET_SIZE(remembered) != PyList_GET_SIZE(value) || (alone && Py_REFCNT(value) != 1))
            return 0;
        for (Py_ssize_t at = 0; at < PyList_GET_SIZE(remembered); at++) {
            int equal = same(PyList_GET_ITEM(remembered, at), PyList_GET_ITEM(value, at), alone);
            if (equal != 1)
                return equal;
        }
        return 1;
    }
    if (type == &PyFloat_Type) { /* 0.0 is not -0.0 */
        double one = PyFloat_AS_DOUBLE(remembered), two = PyFloat_AS_DOUBLE(value);
        return memcmp(&one, &two, sizeof one) == 0;
    }
    return 0; /* bool and None: identity has said it */
}

/* The `__dict__` of an object, borrowed. NULL without an exception if it has none that is a dict. */
static PyObject *
fields_of(PyObject *found)
{
    PyObject **place = _PyObject_GetDictPtr(found);
    if (place == NULL || *place == NULL) { /* its fields are in the object itself, until they are asked for */
        int was_enabled = PyGC_Disable();
        Py_XDECREF(PyObject_GenericGetDict(found, NULL));
        if (was_enabled)
            PyGC_Enable();
        PyErr_Clear();
        place = _PyObject_GetDictPtr(found);
    }
    return place != NULL && *place != NULL && PyDict_CheckExact(*place) ? *place : NULL;
}

/* Whether the names of the fields that were set are those that are remembered. 1, 0, or -1 with an exception. An odd
 * name has an __eq__ of its own, which may do anything. */
static int
same_names(PyObject *remembered, PyObject *names)
{
    Py_INCREF(remembered);
    Py_INCREF(names);
    int equal = PyObject_RichCompareBool(remembered, names, Py_EQ);
    Py_DECREF(names);
    Py_DECREF(remembered);
    return equal;
}

static int
same_message(PyObject *found, const Row *row)
{
    if (Py_TYPE(found) != row->kind)
        return 0;
    PyObject *fields = fields_of(found), *extra = SLOT(found, extra_offset), *names = SLOT(found, set_offset);
    if (fields == NULL || extra == NULL || names == NULL || !PySet_CheckExact(names))
        return 0;
    if (row->extra == Py_None ? extra != Py_None : !PyDict_CheckExact(extra) || PyDict_GET_SIZE(extra))
        return 0;
    int equal = same(row->fields, fields, 0);
    return equal == 1 ? same_names(row->names, names) : equal;
}

/* Whether an object that can be changed has one owner, and no weak reference that would give it another. */
static int
has_one_owner(PyObject *value)
{
    if (Py_REFCNT(value) != 1)
        return 0;
    return !PyType_SUPPORTS_WEAKREFS(Py_TYPE(value)) || *PyObject_GET_WEAKREFS_LISTPTR(value) == NULL;
}

/* Whether `lent`, at its place, is an unchanged message that only that list refers to, with everything in it. Then no
 * other code can see it, and it is as good as a new one. Errors are no: a message is made instead. */
static int
is_returned(PyObject *lent, Py_ssize_t place, const Row *row)
{
    PyObject *found = PyList_GET_ITEM(lent, place);
    if (Py_TYPE(found) != row->kind || !has_one_owner(found))
        return 0;
    PyObject *names = SLOT(found, set_offset);
    if (names == NULL || !PySet_CheckExact(names) || !has_one_owner(names))
        return 0;
    Py_INCREF(found);
    int equal = same_names(row->names, names);
    if (equal < 0)
        PyErr_Clear();
    Py_DECREF(found);
    if (equal != 1 || place >= PyList_GET_SIZE(lent) || PyList_GET_ITEM(lent, place) != found)
        return 0;
    /* From here on no Python code runs: what is true of an owner stays true. */
    PyObject **fields = _PyObject_GetDictPtr(found), *extra = SLOT(found, extra_offset);
    if (fields == NULL || *fields == NULL || !PyDict_CheckExact(*fields) || extra == NULL ||
        SLOT(found, set_offset) != names || SLOT(found, private_offset) != Py_None || !has_one_owner(found) ||
        !has_one_owner(names))
        return 0;
    if (extra != Py_None && (!PyDict_CheckExact(extra) || PyDict_GET_SIZE(extra) || Py_REFCNT(extra) != 1))
        return 0;
    return (extra == Py_None) == (row->extra == Py_None) && same(row->fields, *fields, 1) == 1;
}

/* ---- what Python calls */

/* Row `at` of the four columns, into a row that is zeroed or holds another. 0, or -1 with an exception. */
static int
take(PyObject *const *columns, Py_ssize_t at, Row *row)
{
    PyObject *found[4];
    for (int which = 0; which < 4; which++) {
        if (at >= PyList_GET_SIZE(columns[which])) {
            PyErr_SetString(PyExc_IndexError, "a column is shorter than its number of messages");
            return -1;
        }
        found[which] = PyList_GET_ITEM(columns[which], at);
    }
    int is_model = found[0] == (PyObject *)row->kind;
    if (!is_model)
        is_model = base_model != NULL && PyType_Check(found[0]) &&
                   PyType_IsSubtype((PyTypeObject *)found[0], base_model);
    if (!is_model || !PyDict_CheckExact(found[1]) || !PySet_CheckExact(found[2])) {
        PyErr_SetString(PyExc_TypeError, "columns are a model's class, a dict, a set, and a dict or None");
        return -1;
    }
    *row = (Row){(PyTypeObject *)found[0], found[1], found[2], found[3]};
    return 0;
}

/* The number that comes last. -1 with an exception if the others are no lists. */
static Py_ssize_t
number_of(PyObject *const *arguments, Py_ssize_t given, Py_ssize_t lists)
{
    int fits = given == lists + 1;
    for (Py_ssize_t at = 0; fits && at < lists; at++)
        fits = PyList_CheckExact(arguments[at]);
    Py_ssize_t number = fits ? PyLong_AsSsize_t(arguments[lists]) : -1;
    if (number < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%zd lists and a number of messages are needed", lists);
    return number;
}

/* A list of new messages: the first `number` of those that are remembered. */
static PyObject *
copy_first(PyObject *const *columns, Py_ssize_t number)
{
    PyObject *made = PyList_New(number);
    Row row = {NULL};
    for (Py_ssize_t at = 0; made != NULL && at < number; at++) {
        PyObject *copied = take(columns, at, &row) < 0 ? NULL : message(&row);
        if (copied == NULL)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, at, copied);
    }
    return made;
}

/* Ask for the table of a dict. */
static inline void
fetch_table(PyObject *fields)
{
    if (fields == NULL || !PyDict_CheckExact(fields))
        return;
    PyDictObject *dict = (PyDictObject *)fields;
    char *table = dict->ma_values != NULL ? (char *)dict->ma_values : (char *)dict->ma_keys;
    FETCH(table);
    FETCH(table + LINE_BYTES);
}

/* Ask for messages that are compared soon, and for what is remembered of them. Each has `step` places in its list, and is
 * in the last of these. */
static inline void
fetch_messages(PyObject *messages, Py_ssize_t step, PyObject *remembered, Py_ssize_t at)
{
    if (step * (at + AHEAD + 1) > PyList_GET_SIZE(messages) || at + AHEAD >= PyList_GET_SIZE(remembered))
        return;
    PyObject *coming[4]; /* the farthest, and at a half, a quarter and an eighth of the way to it */
    for (int which = 0; which < 4; which++)
        coming[which] = PyList_GET_ITEM(messages, step * (at + (AHEAD >> which) + 1) - 1);
    FETCH(coming[0]);
    FETCH((char *)coming[0] - LINE_BYTES / 2); /* where Python keeps the pointer to its dict */
    FETCH(PyList_GET_ITEM(remembered, at + AHEAD));
    fetch_table(PyList_GET_ITEM(remembered, at + AHEAD / 2));
    if (PyType_IsSubtype(Py_TYPE(coming[1]), base_model)) {
        PyObject *names = SLOT(coming[1], set_offset);
        FETCH(fields_of(coming[1]));
        for (int shift = 0; names != NULL && shift < 4 * LINE_BYTES; shift += LINE_BYTES)
            FETCH((char *)names + shift);
    }
    if (PyType_IsSubtype(Py_TYPE(coming[2]), base_model))
        fetch_table(fields_of(coming[2]));
    PyObject *fields = PyType_IsSubtype(Py_TYPE(coming[3]), base_model) ? fields_of(coming[3]) : NULL;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (fields != NULL && PyDict_Next(fields, &position, &key, &value))
        FETCH(value);
}

PyDoc_STRVAR(copies_doc, "copies(kinds, fields, names, extras, numbers, /)\n--\n\n"
                         "For each of the numbers a list of as many new messages, of those that are remembered.");

static PyObject *
copies(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    int fits = given == 5;
    for (Py_ssize_t at = 0; fits && at < 5; at++)
        fits = PyList_CheckExact(arguments[at]);
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "four columns and a list of numbers are needed");
        return NULL;
    }
    PyObject *made = PyList_New(0), *listed = made;
    int was_enabled = PyGC_Disable();
    for (Py_ssize_t at = 0; listed != NULL && at < PyList_GET_SIZE(arguments[4]); at++) {
        Py_ssize_t number = PyLong_AsSsize_t(PyList_GET_ITEM(arguments[4], at));
        if (number < 0 && !PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a number of messages cannot be negative");
        listed = number < 0 ? NULL : copy_first(arguments, number);
        if (listed != NULL && PyList_Append(made, listed) < 0)
            Py_CLEAR(listed);
        Py_XDECREF(listed);
    }
    if (was_enabled)
        PyGC_Enable();
    if (listed == NULL)
        Py_CLEAR(made); /* not before: it may call finalizers */
    return made;
}

/* Put an object, whose reference is taken, into the list of those that are lent. The one that leaves it is kept in
 * `dropped`: its end may call finalizers. */
static int
put_lent(PyObject *lent, Py_ssize_t place, PyObject *object, PyObject *dropped)
{
    PyObject *leaves = PyList_GET_ITEM(lent, place);
    if (PyList_Append(dropped, leaves) < 0) {
        Py_DECREF(object);
        return -1;
    }
    PyList_SET_ITEM(lent, place, object);
    Py_DECREF(leaves); /* not the last reference */
    return 0;
}

/* Lend the messages that have come back. NULL where there is none. Those that came back changed are dropped. */
static int
lend_returned(PyObject *const *arguments, Py_ssize_t number, PyObject *lent, PyObject *made, PyObject *dropped)
{
    Row row = {NULL};
    for (Py_ssize_t at = 0; at < number; at++) {
        if (take(arguments, at, &row) < 0)
            return -1;
        fetch_messages(lent, 2, arguments[1], at);
        for (Py_ssize_t place = 2 * at; place < 2 * at + 2 && place < PyList_GET_SIZE(lent); place++) {
            if (Py_REFCNT(PyList_GET_ITEM(lent, place)) != 1)
                continue;
            if (is_returned(lent, place, &row)) {
                PyList_SET_ITEM(made, at, Py_NewRef(PyList_GET_ITEM(lent, place)));
                break;
            }
            if (place < PyList_GET_SIZE(lent) && put_lent(lent, place, Py_NewRef(Py_None), dropped) < 0)
                return -1;
        }
    }
    return 0;
}

/* Make the messages that are missing, and remember that they are lent. */
static int
lend_new(PyObject *const *arguments, Py_ssize_t number, PyObject *lent, PyObject *made, PyObject *dropped)
{
    Row row = {NULL};
    while (PyList_GET_SIZE(lent) < 2 * number)
        if (PyList_Append(lent, Py_None) < 0)
            return -1;
    for (Py_ssize_t at = 0; at < number; at++) {
        if (PyList_GET_ITEM(made, at) != NULL)
            continue;
        PyObject *copied = take(arguments, at, &row) < 0 ? NULL : message(&row);
        if (copied == NULL)
            return -1;
        PyList_SET_ITEM(made, at, copied);
        Py_ssize_t older = 2 * at, newer = older + 1;
        if (put_lent(lent, older, Py_NewRef(PyList_GET_ITEM(lent, newer)), dropped) < 0 ||
            put_lent(lent, newer, Py_NewRef(copied), dropped) < 0)
            return -1;
    }
    return 0;
}

PyDoc_STRVAR(lend_doc, "lend(kinds, fields, names, extras, lent, number, /)\n--\n\n"
                       "Messages as `copies` makes them. `lent` keeps two of each that were given out. One that is "
                       "unchanged, and that nothing else refers to, is given out again.");

static PyObject *
lend(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    Py_ssize_t number = number_of(arguments, given, 5);
    if (number < 0)
        return NULL;
    PyObject *lent = arguments[4], *made = PyList_New(number), *dropped = PyList_New(0);
    int failed = made == NULL || dropped == NULL || lend_returned(arguments, number, lent, made, dropped) < 0;
    if (!failed) {
        int was_enabled = PyGC_Disable();
        failed = lend_new(arguments, number, lent, made, dropped) < 0;
        if (was_enabled)
            PyGC_Enable();
    }
    if (failed)
        Py_CLEAR(made);
    Py_XDECREF(dropped); /* only now: it may call finalizers */
    return made;
}

PyDoc_STRVAR(unchanged_doc, "unchanged(values, kinds, fields, names, extras, number, start=0, /)\n--\n\n"
                            "Up to where the values, from `start` on, are what is remembered, of `number`.");

static PyObject *
unchanged(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    Py_ssize_t at = given == 7 ? PyLong_AsSsize_t(arguments[6]) : 0;
    Py_ssize_t number = at < 0 ? -1 : number_of(arguments, given == 7 ? 6 : given, 5);
    if (at < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "messages are compared from a position on");
    if (number < 0)
        return NULL;
    PyObject *values = arguments[0];
    Row row = {NULL};
    for (; at < number && at < PyList_GET_SIZE(values); at++) {
        if (take(arguments + 1, at, &row) < 0)
            return NULL;
        fetch_messages(values, 1, arguments[2], at);
        int equal = same_message(PyList_GET_ITEM(values, at), &row);
        if (equal < 0)
            return NULL;
        if (equal == 0)
            break;
    }
    return PyLong_FromSsize_t(at);
}

PyDoc_STRVAR(common_doc, "common(a, a_at, b, b_at, size, back, /)\n--\n\n"
                         "How many bytes are equal from a[a_at] and b[b_at] on, or with `back` before them.");

static PyObject *
common(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 6 || !PyBytes_CheckExact(arguments[0]) || !PyBytes_CheckExact(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "two texts, each with a position, a size and a direction are needed");
        return NULL;
    }
    Py_ssize_t a_at = PyLong_AsSsize_t(arguments[1]), b_at = PyLong_AsSsize_t(arguments[3]);
    Py_ssize_t size = PyLong_AsSsize_t(arguments[4]), done = 0, step = 4096;
    int back = arguments[5] == Py_True;
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t a_room = back ? a_at : PyBytes_GET_SIZE(arguments[0]) - a_at;
    Py_ssize_t b_room = back ? b_at : PyBytes_GET_SIZE(arguments[2]) - b_at;
    if (a_at < 0 || b_at < 0 || size > a_room || size > b_room || a_at > PyBytes_GET_SIZE(arguments[0]) ||
        b_at > PyBytes_GET_SIZE(arguments[2])) {
        PyErr_SetString(PyExc_IndexError, "a text is shorter than what is compared");
        return NULL;
    }
    const char *a = PyBytes_AS_STRING(arguments[0]) + a_at, *b = PyBytes_AS_STRING(arguments[2]) + b_at;
    for (; done < size; done += step) {
        if (step > size - done)
            step = size - done;
        Py_ssize_t shift = back ? -done - step : done;
        if (memcmp(a + shift, b + shift, step) == 0)
            continue;
        if (back)
            for (; a[-done - 1] == b[-done - 1]; done++)
                ;
        else
            for (; a[done] == b[done]; done++)
                ;
        break;
    }
    return PyLong_FromSsize_t(done);
}

/* Ask for dicts that come soon, their tables and their values. */
static inline void
fetch_ahead(PyObject *list, Py_ssize_t position)
{
    FETCH(PyList_GET_ITEM(list, position + AHEAD));
    PyObject *near = PyList_GET_ITEM(list, position + AHEAD / 2), *nearest = PyList_GET_ITEM(list, position + AHEAD / 4);
    if (PyDict_CheckExact(near))
        for (int shift = 0; shift < 3 * LINE_BYTES; shift += LINE_BYTES)
            FETCH((char *)((PyDictObject *)near)->ma_keys + shift);
    PyObject *key, *item;
    Py_ssize_t at = 0;
    while (PyDict_CheckExact(nearest) && PyDict_Next(nearest, &at, &key, &item))
        FETCH(item);
}

/* 1 if JSON holds a value as it is, 0 if not, -1 (without an exception) if it holds more than `left` values. */
static int
holds_plain(PyObject *value, Py_ssize_t room, Py_ssize_t *left)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBool_Type || value == Py_None)
        return 1;
    if (type == &PyFloat_Type)
        return isfinite(PyFloat_AS_DOUBLE(value)) ? 1 : 0;
    int is_dict = type == &PyDict_Type, plain = 1;
    if (!is_dict && type != &PyList_Type)
        return 0;
    Py_ssize_t size = is_dict ? PyDict_GET_SIZE(value) : PyList_GET_SIZE(value), position = 0;
    if (size && room <= 0)
        return 0;
    if ((*left -= size) < 0)
        return -1;
    PyObject *key, *item;
    while (is_dict && plain == 1 && PyDict_Next(value, &position, &key, &item))
        plain = PyUnicode_CheckExact(key) ? holds_plain(item, room - 1, left) : 0;
    for (; !is_dict && plain == 1 && position < size; position++) {
        if (position + AHEAD < size)
            fetch_ahead(value, position);
        plain = holds_plain(PyList_GET_ITEM(value, position), room - 1, left);
    }
    return plain;
}

PyDoc_STRVAR(is_plain_doc, "is_plain(value, room, limit, /)\n--\n\n"
                           "Whether a value has only JSON's types, and at most `room` levels inside; None if it holds "
                           "more than `limit` values.");

static PyObject *
is_plain(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "a value and two limits are needed");
        return NULL;
    }
    Py_ssize_t room = PyLong_AsSsize_t(arguments[1]), left = PyLong_AsSsize_t(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    int plain = room < 0 ? 0 : holds_plain(arguments[0], room, &left);
    if (plain < 0)
        Py_RETURN_NONE;
    return PyBool_FromLong(plain);
}

/* ---- the module */

/* Where pydantic's base class keeps a slot. -1 with an exception if it is no slot that holds an object. */
static Py_ssize_t
offset_of(PyTypeObject *model, const char *name)
{
    PyObject *slot = PyObject_GetAttrString((PyObject *)model, name);
    Py_ssize_t offset = -1;
    if (slot != NULL && Py_IS_TYPE(slot, &PyMemberDescr_Type)) {
        PyMemberDescrObject *member = (PyMemberDescrObject *)slot;
        if (member->d_member->type == T_OBJECT_EX && PyDescr_TYPE(member) == model)
            offset = member->d_member->offset;
    }
    if (offset < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_ImportError, "this pydantic keeps %s in another way than is known here", name);
    Py_XDECREF(slot);
    return offset;
}

PyDoc_STRVAR(attach_doc, "attach()\n--\n\n"
                         "Import pydantic, before messages are copied or compared. Raises ImportError if its models are "
                         "not as expected.");

static PyObject *
attach(PyObject *module, PyObject *ignored)
{
    PyObject *pydantic = PyImport_ImportModule("pydantic.main");
    PyObject *found = pydantic == NULL ? NULL : PyObject_GetAttrString(pydantic, "BaseModel");
    Py_XDECREF(pydantic);
    if (found == NULL)
        return NULL;
    if (!PyType_Check(found) || !PyType_IS_GC((PyTypeObject *)found)) {
        Py_DECREF(found);
        PyErr_SetString(PyExc_ImportError, "pydantic.main.BaseModel is another thing than is known here");
        return NULL;
    }
    PyTypeObject *model = (PyTypeObject *)found; /* kept as long as the process lives */
    if ((set_offset = offset_of(model, "__pydantic_fields_set__")) < 0 ||
        (extra_offset = offset_of(model, "__pydantic_extra__")) < 0 ||
        (private_offset = offset_of(model, "__pydantic_private__")) < 0)
        return NULL;
    base_model = model;
    Py_RETURN_NONE;
}

/* ---- products of vectors */

#define LANES 32

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef FOR_EACH_PROCESSOR
#define FOR_EACH_PROCESSOR
#endif

/* Each row is added up in the same order wherever it lies. The lanes are what a compiler makes vectors of. */
FOR_EACH_PROCESSOR static void
multiply(const short *row, const float *scales, const float *target, float *out, Py_ssize_t rows, Py_ssize_t width)
{
    for (Py_ssize_t number = 0; number < rows; number++, row += width) {
        float lanes[LANES] = {0}, total = 0;
        Py_ssize_t place = 0;
        for (; place + LANES <= width; place += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] += (float)row[place + lane] * target[place + lane];
        for (; place < width; place++)
            total += (float)row[place] * target[place];
        for (int lane = 0; lane < LANES; lane++)
            total += lanes[lane];
        out[number] = total * scales[number];
    }
}

PyDoc_STRVAR(products_doc,
"products(numbers, scales, target, out)\n\n"
"Fill `out` with the products of rows of 16-bit integers and `target`, each times the scale of its row. The last three\n"
"hold 32-bit floats. No object is touched meanwhile, so other threads run.");

static PyObject *
products(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer views[4];
    int held = 0;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "products takes numbers, scales, target and out");
        return NULL;
    }
    while (held < 4 && PyObject_GetBuffer(arguments[held], &views[held], held == 3 ? PyBUF_CONTIG : PyBUF_CONTIG_RO) == 0)
        held++;
    if (held == 4) {
        Py_ssize_t rows = views[1].len / (Py_ssize_t)sizeof(float), width = views[2].len / (Py_ssize_t)sizeof(float);
        if (views[0].len != rows * width * (Py_ssize_t)sizeof(short) || views[3].len != views[1].len)
            PyErr_SetString(PyExc_ValueError, "products takes arrays whose sizes agree");
        else {
            Py_BEGIN_ALLOW_THREADS
            multiply(views[0].buf, views[1].buf, views[2].buf, views[3].buf, rows, width);
            Py_END_ALLOW_THREADS
        }
    }
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copies", (PyCFunction)(void (*)(void))copies, METH_FASTCALL, copies_doc},
    {"lend", (PyCFunction)(void (*)(void))lend, METH_FASTCALL, lend_doc},
    {"unchanged", (PyCFunction)(void (*)(void))unchanged, METH_FASTCALL, unchanged_doc},
    {"attach", attach, METH_NOARGS, attach_doc},
    {"common", (PyCFunction)(void (*)(void))common, METH_FASTCALL, common_doc},
    {"products", (PyCFunction)(void (*)(void))products, METH_FASTCALL, products_doc},
    {"is_plain", (PyCFunction)(void (*)(void))is_plain, METH_FASTCALL, is_plain_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "perdure_speed", "Perdure's inner loops in C.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit_perdure_speed(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", 6) < 0) /* what the functions take and give */
        Py_CLEAR(module);
    return module;
}
