// Memory that a replay allocates for results.
#pragma once

#include "conversions.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>

#include <utility>
#include <vector>

namespace pygraph {
namespace {

struct ResultMemory {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  c10::Allocator* allocator;  // nullptr where a device makes tensors in a way of its own
  size_t bytes;               // of its storage
  Py_ssize_t kept = -1;       // its position among kept memory; -1 if it is not kept

  // As torch does (2.11 and 2.13), without the dispatcher, which takes half as long again.
  at::Tensor make(bool filled) const {
    if (allocator == nullptr || filled) return at::empty_strided(sizes, strides, options);
    const c10::DispatchKeySet keys(options.computeDispatchKey());
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return at::Tensor(at::detail::empty_strided_generic(sizes, strides, allocator, keys, dtype));
  }
};

// Whether nothing but these variables refers to a tensor and its memory. Devices that make tensors in a way of their own
// may do so in Python, so that there is an object of each.
bool is_unshared(const at::Tensor& tensor, const ResultMemory& memory) {
  if (tensor.storage().use_count() != 1) return false;
  if (tensor.use_count() == 1) return true;
  if (memory.allocator != nullptr || tensor.use_count() != 2) return false;
  PyObject* object = checked(THPVariable_Wrap(tensor));
  const bool alone = Py_REFCNT(object) == 2;  // this one, and that by which the tensor keeps its object
  Py_DECREF(object);
  return alone;
}

// Whether a tensor is as a replay makes it, with nothing that was added since.
bool is_as_made(const at::Tensor& tensor, const ResultMemory& memory) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.autograd_meta() == nullptr && impl.storage_offset() == 0 && impl.dtype() == memory.options.dtype() &&
      impl.device() == memory.options.device() && is_equal(impl.sizes(), memory.sizes) &&
      is_equal(impl.strides(), memory.strides) && !tensor.is_conj() && !tensor.is_neg() && !tensor.is_inference();
}

// Whether a tensor may stay as a result in this memory.
bool fits_as_result(const at::Tensor& tensor, const ResultMemory& memory) {
  return is_as_made(tensor, memory) && tensor.storage().nbytes() == memory.bytes;
}

// (an empty tensor of the right dtype and device, sizes, strides, the position among kept memory or None)
ResultMemory describe_memory(PyObject* description) {
  const at::Tensor& tensor = THPVariable_Unpack(item(description, 0));
  const bool known = tensor.is_cuda() || tensor.is_cpu();
  c10::Allocator* allocator = known ? tensor.storage().allocator() : nullptr;
  std::vector<int64_t> sizes = to_ints(item(description, 1)), strides = to_ints(item(description, 2));
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize());
  PyObject* kept = item(description, 3);
  const Py_ssize_t position = kept == Py_None ? -1 : static_cast<Py_ssize_t>(to_int(kept));
  return {std::move(sizes), std::move(strides), tensor.options(), allocator, bytes, position};
}

}  // namespace
}  // namespace pygraph
