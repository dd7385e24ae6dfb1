// Properties of tensors that a replay depends on: layout, alignment, address, and the memory of the storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <exception>
#include <utility>

namespace pygraph {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kWidestLoad = 16;

// As `alignment_of` in pygraph/runtime/alignment.py.
uint64_t alignment_of(uint64_t address) {
  if (address % kWidestLoad != 0) return address % kWidestLoad;
  return address % kAlignment == 0 ? kAlignment : address & (~address + 1);
}

bool is_equal(c10::IntArrayRef a, c10::IntArrayRef b) {  // a loop to inline, since a tensor has few dimensions
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

struct Layout {
  c10::DispatchKeySet keys;
  c10::ScalarType dtype;
  c10::Device device;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;

  explicit Layout(const c10::TensorImpl& tensor)
      : keys(tensor.key_set()), dtype(c10::typeMetaToScalarType(tensor.dtype())), device(tensor.device()),
        sizes(tensor.sizes()), strides(tensor.strides()) {}

  bool fits(const c10::TensorImpl& tensor) const {
    return tensor.key_set() == keys && tensor.dtype() == c10::scalarTypeToTypeMeta(dtype) &&
        tensor.device() == device && is_equal(tensor.sizes(), sizes) && is_equal(tensor.strides(), strides);
  }
};

// As the tensor's own method, which is two virtual calls; they are needed only for a view.
bool requires_grad(const c10::TensorImpl& tensor) {
  auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  if (meta == nullptr) return false;
  return meta->is_view_ ? tensor.requires_grad() : meta->requires_grad_ || meta->grad_fn_ != nullptr;
}

// Whether hooks were ever given to a tensor, which a backward inside the call may have to call.
bool may_have_hooks(const c10::TensorImpl& tensor) {
  auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  return meta != nullptr && !meta->hooks_.empty();
}

// As mutable_data(), which gives a lazily cloned tensor memory of its own, without asking whether there is a storage.
uint64_t address_of(const c10::TensorImpl& tensor) {
  if (tensor.is_empty()) return 0;
  c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  auto* start = static_cast<char*>(storage->mutable_data());
  return reinterpret_cast<uint64_t>(start + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()));
}

const void* storage_of(const c10::TensorImpl& tensor) {
  return tensor.unsafe_storage().unsafeGetStorageImpl()->data();
}

using AddressRange = std::pair<uint64_t, uint64_t>;  // the first address, and the one after the last

AddressRange storage_range(const c10::TensorImpl& tensor) {
  const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  auto start = reinterpret_cast<uint64_t>(storage->data());
  return {start, start + storage->nbytes()};
}

// The function that frees memory of a device's allocator, which never overlaps; nullptr if there is no such function.
c10::DeleterFnPtr deleter_of(c10::DeviceType type) {
  if (type != c10::kCPU && type != c10::kCUDA) return nullptr;  // others may have no allocator, which is an error
  try {
    c10::DeleterFnPtr deleter = c10::GetAllocator(type)->raw_deleter();
    return deleter == &c10::detail::deleteNothing ? nullptr : deleter;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Whether a storage does not own its memory, as one made by DLPack, so that other storages may lie over the same.
bool is_foreign(const c10::TensorImpl& tensor, c10::DeleterFnPtr deleter) {
  return tensor.unsafe_storage().unsafeGetStorageImpl()->data_ptr().get_deleter() != deleter;
}

}  // namespace
}  // namespace pygraph
