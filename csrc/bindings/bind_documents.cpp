// Converts lists of documents to integer columns; plain Python needs microseconds per value.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace py = pybind11;

namespace {

// Values that a key of a document may have. Its column contains the integer, 0 or 1 for a flag, or
// the code of a word.
struct Field {
  py::str name;
  std::int64_t largest;
  bool flag;
  py::object words;      // word -> code, or None for numbers
  py::object otherwise;  // integer for documents without this key; None: required
};

std::vector<Field> fields_of(const py::list& given) {
  std::vector<Field> fields;
  for (const py::handle& item : given) {
    const auto row = py::cast<py::tuple>(item);
    fields.push_back({py::cast<py::str>(row[0]), py::cast<std::int64_t>(row[1]),
                      py::cast<bool>(row[2]), row[3], row[4]});
    if (!fields.back().words.is_none() && !PyDict_CheckExact(fields.back().words.ptr()))
      throw py::type_error("words are no dict");
    // interned, because a look-up compares identity first
    PyObject* name = fields.back().name.release().ptr();
    PyUnicode_InternInPlace(&name);
    fields.back().name = py::reinterpret_steal<py::str>(name);
  }
  return fields;
}

// Accepts exact types only: the Python checks read documents with any other value.
bool read_value(const Field& field, PyObject* value, std::int64_t& out) {
  if (!field.words.is_none()) {
    if (!PyUnicode_CheckExact(value)) return false;
    value = PyDict_GetItemWithError(field.words.ptr(), value);
    if (value == nullptr) return false;
  } else if (PyBool_Check(value)) {
    out = value == Py_True ? 1 : 0;
    return field.flag;
  }
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  out = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0 && out >= 0 && out <= field.largest;
}

bool read_document(const std::vector<Field>& fields, PyObject* document, std::int64_t* column,
                   py::ssize_t stride) {
  if (!PyDict_CheckExact(document)) return false;
  py::ssize_t known = 0;
  for (const Field& field : fields) {
    PyObject* value = PyDict_GetItemWithError(document, field.name.ptr());
    if (value != nullptr) {
      ++known;
      if (!read_value(field, value, *column)) return false;
    } else if (field.otherwise.is_none()) {
      return false;
    } else {
      *column = PyLong_AsLongLong(field.otherwise.ptr());
    }
    column += stride;
  }
  return known == PyDict_GET_SIZE(document);
}

// Returns an array (fields, documents), or None if any document has another key or value than the
// fields allow. The caller then finds out what is wrong, if anything.
py::object read_documents(const py::list& documents, const py::list& given) {
  const std::vector<Field> fields = fields_of(given);
  const auto count = static_cast<py::ssize_t>(documents.size());
  py::array_t<std::int64_t> columns({static_cast<py::ssize_t>(fields.size()), count});
  std::int64_t* out = columns.mutable_data();
  constexpr py::ssize_t kSome =
      1 << 14;  // values between signal checks, a few hundredths of a second
  for (py::ssize_t n = 0; n < count; ++n) {
    if (n % kSome == kSome - 1 && PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (n >= PyList_GET_SIZE(documents.ptr()))
      return py::none();  // a signal handler shortened the list
    const bool read = read_document(fields, PyList_GET_ITEM(documents.ptr(), n), out + n, count);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (!read) return py::none();
  }
  return columns;
}

}  // namespace

void register_documents(py::module_& m) {
  m.def("read_documents", &read_documents, py::arg("documents"), py::arg("fields"));
}
