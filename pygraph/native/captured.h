// Captured tensors, as closed-over ones and parameters: the same objects as when the plan was made, with the same
// layout and, where graphs read them by address, at the same address.
#pragma once

#include "conversions.h"
#include "tensors.h"

#include <algorithm>
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

// Have the cache fetch what is read of a captured tensor that is compared later: its object, and the tensor that is to
// be there. A prefetch of memory that is gone does nothing.
void fetch_tensor(const CapturedTensor& captured) {
  __builtin_prefetch(captured.object);
  const char* tensor = reinterpret_cast<const char*>(captured.tensor);
  for (size_t offset = 0; offset < sizeof(c10::TensorImpl); offset += 64) __builtin_prefetch(tensor + offset);
}

// The same for what the tensor refers to, once that itself is there.
void fetch_parts(const CapturedTensor& captured) {
  const c10::TensorImpl* tensor = captured.now();
  __builtin_prefetch(tensor->unsafe_storage().unsafeGetStorageImpl());
  const char* meta = reinterpret_cast<const char*>(tensor->autograd_meta());
  if (meta == nullptr) return;
  for (size_t offset = 0; offset < sizeof(torch::autograd::AutogradMeta); offset += 64) {
    __builtin_prefetch(meta + offset);
  }
}

// Whether all hold. A step has a thousand, all over memory, and waiting for one after the other would take most of the
// time of recognising a call.
bool hold(const std::vector<CapturedTensor>& all) {
  constexpr size_t kTensors = 16, kParts = 6;
  const size_t count = all.size();
  for (size_t i = 0; i < std::min(count, kTensors); ++i) fetch_tensor(all[i]);
  for (size_t i = 0; i < std::min(count, kParts); ++i) fetch_parts(all[i]);
  for (size_t i = 0; i < count; ++i) {
    if (i + kTensors < count) fetch_tensor(all[i + kTensors]);
    if (i + kParts < count) fetch_parts(all[i + kParts]);
    if (!all[i].holds()) return false;
  }
  return true;
}

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
