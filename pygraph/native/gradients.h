// The Python type `Gradients`: the gradients of some tensors as one argument, read and stored where autograd does, so
// that no object of Python is made for any of them.
//
// A gradient that the last replay has stored and that only its tensor refers to is replaced in place: its memory is the
// next one's. One that Python has looked at is not, as somebody may be reading it on another stream: the allocator knows
// of that, and gives other memory.
#pragma once

#include "conversions.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <vector>

namespace pygraph {
namespace {

PyTypeObject* gradients_type = nullptr;

// A tensor that is differentiated.
struct Differentiated {
  PyObject* tensor;  // owned

  // The gradient that the last replay has stored, and the stream that its memory belongs to. Kept from being another
  // tensor at the same address, but not alive.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> made{at::Tensor().getIntrusivePtr()};
  uint64_t stream = 0;

  explicit Differentiated(PyObject* tensor) : tensor(Py_NewRef(tensor)) {}

  at::Tensor& gradient() const { return THPVariable_Unpack(tensor).mutable_grad(); }

  void store(const at::Tensor& gradient, uint64_t on_stream) {
    if (made._unsafe_get_target() != gradient.unsafeGetTensorImpl()) made = decltype(made)(gradient.getIntrusivePtr());
    stream = on_stream;
    this->gradient() = gradient;
  }

  // Whether a gradient is the last replay's, on this stream, so that nobody but its tensor needs to refer to it.
  bool has_made(const at::Tensor& gradient, uint64_t on_stream) const {
    return stream == on_stream && made._unsafe_get_target() == gradient.unsafeGetTensorImpl();
  }
};

struct GradientsObject {
  PyObject_HEAD
  std::vector<Differentiated>* tensors;  // owned
};

GradientsObject* as_gradients(PyObject* object) {
  return Py_TYPE(object) == gradients_type ? reinterpret_cast<GradientsObject*>(object) : nullptr;
}

// ---- the type ------------------------------------------------------------------------------------------------------

PyObject* gradients_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* tensors;
  if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &tensors)) return nullptr;
  auto* self = reinterpret_cast<GradientsObject*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->tensors = new std::vector<Differentiated>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
    if (!THPVariable_Check(tensor)) {
      Py_DECREF(self);
      PyErr_SetString(PyExc_TypeError, "expected a tuple of tensors");
      return nullptr;
    }
    self->tensors->emplace_back(tensor);
  }
  return reinterpret_cast<PyObject*>(self);
}

int gradients_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  for (Differentiated& one : *reinterpret_cast<GradientsObject*>(object)->tensors) Py_VISIT(one.tensor);
  return 0;
}

int gradients_clear(PyObject* object) {
  std::vector<Differentiated> tensors;
  tensors.swap(*reinterpret_cast<GradientsObject*>(object)->tensors);
  for (Differentiated& one : tensors) Py_DECREF(one.tensor);
  return 0;
}

void gradients_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  gradients_clear(object);
  delete reinterpret_cast<GradientsObject*>(object)->tensors;
  type->tp_free(object);
  Py_DECREF(type);
}

PyType_Slot gradients_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(gradients_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(gradients_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(gradients_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(gradients_clear)},
    {0, nullptr},
};

PyType_Spec gradients_spec = {
    "pygraph_native.Gradients", sizeof(GradientsObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, gradients_slots,
};

}  // namespace
}  // namespace pygraph
