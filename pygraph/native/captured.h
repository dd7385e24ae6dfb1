// Captured tensors, as closed-over ones and parameters: the same objects as when the plan was made, with the same
// layout and, where graphs read them by address, at the same address.
#pragma once

#include "conversions.h"
#include "tensors.h"

#include <vector>

namespace pygraph {
namespace {

struct CapturedTensor {
  PyObject* object;  // borrowed from the plan
  const c10::TensorImpl* tensor;
  uint64_t address;  // where graphs read it
  bool has_address;  // whether graphs read it by address
  Layout layout;
  bool grad;

  c10::TensorImpl* now() const { return THPVariable_Unpack(object).unsafeGetTensorImpl(); }

  bool holds() const {
    c10::TensorImpl* impl = now();
    if (impl != tensor || !layout.fits(*impl) || requires_grad(*impl) != grad) return false;
    return !has_address || address_of(*impl) == address;
  }
};

// Captured tensors of a description: (tensor, address), where the address is None if no graph reads it by address.
std::vector<CapturedTensor> describe_captured(References& references, PyObject* description) {
  std::vector<CapturedTensor> captured;
  for_each(description, [&](PyObject* entry) {
    PyObject* object = item(entry, 0);
    PyObject* address = item(entry, 1);
    references.add(object);
    const c10::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
    bool has_address = address != Py_None && tensor->numel() != 0;
    captured.push_back({
        object, tensor, has_address ? to_word(address) : 0, has_address, Layout(*tensor), tensor->requires_grad(),
    });
  });
  return captured;
}

}  // namespace
}  // namespace pygraph
