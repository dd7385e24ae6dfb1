// Memory for saved tensors, which stays with the graph: a call has it, and the tensors in it, if nobody else refers to them.
#pragma once

#include "conversions.h"
#include "result_memory.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Storage.h>

#include <utility>

namespace pygraph {
namespace {

// Who else refers to a storage, by counts that are compared: of references, and of those to its object in Python.
std::pair<size_t, Py_ssize_t> owners_of(const at::Storage& storage) {
  PyObject* object = checked(THPStorage_Wrap(storage));
  const std::pair<size_t, Py_ssize_t> owners(storage.use_count(), Py_REFCNT(object));
  Py_DECREF(object);
  return owners;
}

// Whether nothing refers to a storage but one tensor, and its object in Python if it has one. In torch 2.13 that object
// stays as long as the storage, and counts as a reference to it.
bool is_sole_owner(const at::Storage& storage) {
  if (storage.use_count() == 1) return true;
  static const auto sole = owners_of(at::empty({1}).storage());
  return owners_of(storage) == sole;
}

constexpr uint64_t kAnyStream = ~uint64_t{0};  // of memory that no stream has used yet

// A tensor and its storage as objects, in a new tuple that owns both.
PyObject* with_storage(const at::Tensor& tensor) {
  PyObject* object = checked(THPVariable_Wrap(tensor));
  PyObject* storage = THPStorage_Wrap(tensor.storage());
  PyObject* pair = storage == nullptr ? nullptr : PyTuple_Pack(2, object, storage);
  Py_DECREF(object);
  Py_XDECREF(storage);
  return checked(pair);
}

// How many refer to a tensor and to its storage, and to the objects of both, which are in a tuple.
struct Owners {
  size_t tensor, storage;
  Py_ssize_t object, storage_object;

  explicit Owners(PyObject* pair) : Owners(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)) {}
  bool operator==(const Owners&) const = default;

 private:
  Owners(PyObject* one, PyObject* its)
      : tensor(THPVariable_Unpack(one).use_count()), storage(THPVariable_Unpack(one).storage().use_count()),
        object(Py_REFCNT(one)), storage_object(Py_REFCNT(its)) {}
};

// Memory for the saved tensors of a graph, `pygraph.runtime.saved_memory`: calls in Python and other plans share it.
struct KeptMemory {
  PyObject* bases = nullptr;    // borrowed from the plan: a list of tensors and None; nullptr if nothing is kept
  PyObject* lent = nullptr;     // borrowed from the plan: a list of what was made of these last, `with_storage`, and None
  uint64_t* streams = nullptr;  // which has used each
  int64_t* is_keeper = nullptr;
  PyObject* keep = nullptr;     // borrowed from the plan; has the graph be one that keeps memory

  bool must_keep() const { return bases != nullptr && *is_keeper == 0; }

  // A tensor in the memory at a position: what is kept, if nothing else refers to it now.
  at::Tensor take(Py_ssize_t position, const ResultMemory& memory, uint64_t stream) const {
    PyObject* last = PyList_GetItem(lent, position);
    PyObject* kept = PyList_GetItem(bases, position);
    if (last == nullptr || kept == nullptr) throw PythonError();
    at::Tensor base;
    if (THPVariable_Check(kept)) base = THPVariable_Unpack(kept);
    // On another stream, the allocator could give it away too early; its storage may have been resized.
    const bool fits = base.defined() && base.storage().nbytes() >= memory.bytes;
    if (fits && streams[position] == stream && last != Py_None && is_back(last, base, memory)) {
      return THPVariable_Unpack(PyTuple_GET_ITEM(last, 0));
    }
    put(lent, position, Py_NewRef(Py_None));
    const bool is_here = streams[position] == stream || streams[position] == kAnyStream;
    if (!fits || !is_here || !is_sole_owner(base.storage())) {
      base = memory.make(false);
      put(bases, position, checked(THPVariable_Wrap(base)));
    }
    streams[position] = stream;
    at::Tensor made = tensor_in(base, memory);
    put(lent, position, with_storage(made));
    return made;
  }

 private:
  static void put(PyObject* list, Py_ssize_t position, PyObject* object) {
    if (PyList_SetItem(list, position, object) < 0) throw PythonError();
  }

  static at::Tensor tensor_in(const at::Tensor& base, const ResultMemory& memory) {
    if (memory.allocator == nullptr) {
      at::AutoDispatchBelowADInplaceOrView no_view;
      return at::as_strided(base, memory.sizes, memory.strides, 0);
    }
    const c10::DispatchKeySet keys(memory.options.computeDispatchKey());
    return tensor_in(base, keys, memory.options.dtype(), memory.sizes, memory.strides);
  }

  static at::Tensor tensor_in(const at::Tensor& base, c10::DispatchKeySet keys, caffe2::TypeMeta dtype,
                              at::IntArrayRef sizes, at::IntArrayRef strides) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), keys, dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return tensor;
  }

  // Whether a tensor that was lent is as it was made, and the call that took it was the last to refer to it.
  static bool is_back(PyObject* last, const at::Tensor& base, const ResultMemory& memory) {
    static const Owners alone = [] {
      const at::Tensor example = at::empty({1});
      PyObject* pair = with_storage(tensor_in(example, example.key_set(), example.dtype(), {1}, {1}));
      const Owners found(pair);
      Py_DECREF(pair);
      return found;
    }();
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(last, 0));
    return tensor.storage().unsafeGetStorageImpl() == base.storage().unsafeGetStorageImpl() &&
        Owners(last) == alone && is_as_made(tensor, memory);
  }
};

// Have the graph be one that keeps memory, if it is to be; others give memory back, in Python.
void begin_to_keep(const KeptMemory& kept) {
  if (kept.must_keep()) Py_DECREF(checked(PyObject_CallNoArgs(kept.keep)));
}

// The memory of saved tensors, or None.
KeptMemory describe_kept(PyObject* description) {
  if (description == Py_None) return {};
  return {
      field(description, "bases"),
      field(description, "lent"),
      reinterpret_cast<uint64_t*>(to_word(field(description, "streams"))),
      reinterpret_cast<int64_t*>(to_word(field(description, "is_keeper"))),
      field(description, "keep"),
  };
}

}  // namespace
}  // namespace pygraph
