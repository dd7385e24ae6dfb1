// Results of a replay: memory for them, views of that memory, and the object that the function returns.
#pragma once

#include "arguments.h"
#include "conversions.h"
#include "pytree.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Storage.h>

#include <string>
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

struct Output {
  int memory;
  bool whole;
  std::vector<int64_t> sizes, strides;  // of the view, if it is not the whole memory
  int64_t offset;
};

struct ResultLeaf {
  enum Kind { FromOutput, Static, Argument, Repeat } kind;
  int index = 0;              // of the output, the argument or the earlier leaf
  PyObject* value = nullptr;  // of a static leaf; borrowed from the plan
  int memory = -1;            // which it is, as it is, and in which nothing else lies; -1 if it is a part of some
};

struct Results {
  std::vector<ResultMemory> memory;
  KeptMemory kept;
  std::vector<Output> outputs;
  std::vector<ResultLeaf> leaves;
  Tree tree;                      // of the returned object
  PyObject* unflatten = nullptr;  // borrowed from the plan; makes that object of all leaves if it is no such tree
};

// ---- a replay ------------------------------------------------------------------------------------------------------

// Whether fresh memory is filled with a value, as a debugging aid of torch's.
bool fills_memory() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

// Memory for results; `replaced` are tensors of before that give theirs, if there are any.
std::vector<at::Tensor> allocate(Results& results, uint64_t stream, std::vector<at::Tensor>& replaced) {
  std::vector<at::Tensor> memory;
  memory.reserve(results.memory.size());
  const bool filled = fills_memory();
  // Hooks get saved tensors, and may have other streams read them for longer than they refer to them.
  const bool keeps = !filled && !at::SavedTensorDefaultHooks::get_hooks().has_value();
  for (size_t i = 0; i < results.memory.size(); ++i) {
    const ResultMemory& one = results.memory[i];
    if (i < replaced.size() && replaced[i].defined()) {
      memory.push_back(std::move(replaced[i]));
      continue;
    }
    memory.push_back(one.kept >= 0 && keeps ? results.kept.take(one.kept, one, stream) : one.make(filled));
  }
  return memory;
}

std::vector<at::Tensor> outputs_in(const Results& results, const std::vector<at::Tensor>& memory) {
  std::vector<at::Tensor> outputs;
  outputs.reserve(results.outputs.size());
  for (const Output& output : results.outputs) {
    const at::Tensor& base = memory[output.memory];
    outputs.push_back(output.whole ? base : at::as_strided(base, output.sizes, output.strides, output.offset));
  }
  return outputs;
}

// Objects by leaf, each a new reference or nullptr.
struct OwnedObjects {
  std::vector<PyObject*> objects;

  explicit OwnedObjects(size_t count) : objects(count, nullptr) {}
  OwnedObjects(const OwnedObjects&) = delete;
  OwnedObjects& operator=(const OwnedObjects&) = delete;
  ~OwnedObjects() {
    for (PyObject* object : objects) Py_XDECREF(object);
  }
};

// The object of a result, in a new reference.
PyObject* wrap(const Results& results, size_t index, const Call& call, const std::vector<at::Tensor>& outputs) {
  const ResultLeaf& leaf = results.leaves[index];
  switch (leaf.kind) {
    case ResultLeaf::FromOutput: return checked(THPVariable_Wrap(outputs[leaf.index]));
    case ResultLeaf::Static: return Py_NewRef(leaf.value);
    case ResultLeaf::Argument: return argument_object(call, leaf.index);
    default: return wrap(results, leaf.index, call, outputs);  // a repetition, of an earlier leaf
  }
}

void fill(OwnedObjects& leaves, const Results& results, const Call& call, const std::vector<at::Tensor>& outputs) {
  for (size_t i = 0; i < leaves.objects.size(); ++i) leaves.objects[i] = wrap(results, i, call, outputs);
}

// The object that the function returns.
PyObject* assemble(const Results& results, const Call& call, const std::vector<at::Tensor>& outputs) {
  OwnedObjects leaves(results.leaves.size());
  fill(leaves, results, call, outputs);
  if (results.unflatten == nullptr) {
    size_t node = 0, leaf = 0;
    return checked(unflatten(results.tree, node, leaves.objects, leaf));
  }
  PyObject* all = checked(PyList_New(leaves.objects.size()));
  for (size_t i = 0; i < leaves.objects.size(); ++i) {
    PyList_SET_ITEM(all, i, std::exchange(leaves.objects[i], nullptr));
  }
  PyObject* result = PyObject_CallOneArg(results.unflatten, all);
  Py_DECREF(all);
  return checked(result);
}

// The results after the gradients, which come first in a list of leaves.
PyObject* assemble_rest(const Results& results, const Call& call, const std::vector<at::Tensor>& outputs) {
  const size_t first = call.found.size();
  PyObject* rest = checked(PyList_New(results.leaves.size() - first));
  try {
    for (size_t i = first; i < results.leaves.size(); ++i) {
      PyList_SET_ITEM(rest, i - first, wrap(results, i, call, outputs));
    }
  } catch (...) {
    Py_DECREF(rest);
    throw;
  }
  return rest;
}

// Store the gradients among the results where autograd does.
void store_gradients(const Results& results, Call& call, const std::vector<at::Tensor>& outputs, uint64_t stream) {
  auto& tensors = *call.gradients->tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ResultLeaf& leaf = results.leaves[i];
    switch (leaf.kind) {
      case ResultLeaf::FromOutput:
        tensors[i].store(outputs[leaf.index], stream);
        break;
      case ResultLeaf::Argument:
        if (leaf.index != static_cast<int>(i)) tensors[i].gradient() = argument_tensor(call, leaf.index);
        break;
      case ResultLeaf::Repeat:
        tensors[i].gradient() = at::Tensor(tensors[leaf.index].gradient());
        break;
      case ResultLeaf::Static:
        tensors[i].gradient() = THPVariable_Check(leaf.value) ? THPVariable_Unpack(leaf.value) : at::Tensor();
        break;
    }
  }
}

// Whether results are a list of leaves, of which the first are gradients.
bool begin_with_gradients(const Results& results, size_t count) {
  return results.unflatten == nullptr && results.tree[0].kind == TreeNode::List && results.leaves.size() >= count &&
      results.tree.size() == results.leaves.size() + 1;
}

// ---- their description ---------------------------------------------------------------------------------------------

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

// (memory, None) or (memory, (sizes, strides, offset))
Output describe_output(PyObject* description) {
  PyObject* view = item(description, 1);
  Output output{static_cast<int>(to_int(item(description, 0))), view == Py_None, {}, {}, 0};
  if (!output.whole) {
    output.sizes = to_ints(item(view, 0));
    output.strides = to_ints(item(view, 1));
    output.offset = to_int(item(view, 2));
  }
  return output;
}

// ("static", value), or "output", "argument" or "repeat" with an index
ResultLeaf describe_result(PyObject* description) {
  const char* name = PyUnicode_AsUTF8(item(description, 0));
  if (name == nullptr) throw PythonError();
  const std::string kind = name;
  if (kind == "static") return {ResultLeaf::Static, 0, item(description, 1)};
  return {
      kind == "output" ? ResultLeaf::FromOutput
          : kind == "argument" ? ResultLeaf::Argument
                               : ResultLeaf::Repeat,
      static_cast<int>(to_int(item(description, 1))),
  };
}

// Find the results that have memory for themselves.
void find_single_results(Results& results) {
  std::vector<int> outputs(results.memory.size(), 0);
  for (const Output& output : results.outputs) outputs[output.memory] += output.whole ? 1 : 2;
  for (ResultLeaf& leaf : results.leaves) {
    if (leaf.kind != ResultLeaf::FromOutput) continue;
    const int memory = results.outputs[leaf.index].memory;
    if (outputs[memory] == 1) leaf.memory = memory;
  }
}

Results describe_results(PyObject* description) {
  Results results;
  for_each(field(description, "memory"), [&](PyObject* one) { results.memory.push_back(describe_memory(one)); });
  results.kept = describe_kept(field(description, "keeps"));
  for_each(field(description, "outputs"), [&](PyObject* one) { results.outputs.push_back(describe_output(one)); });
  for_each(field(description, "results"), [&](PyObject* one) { results.leaves.push_back(describe_result(one)); });
  find_single_results(results);
  PyObject* unflatten = field(description, "unflatten");
  if (unflatten == Py_None) describe_tree(results.tree, field(description, "example"), [](PyObject*) {});
  else results.unflatten = unflatten;
  return results;
}

}  // namespace
}  // namespace pygraph
