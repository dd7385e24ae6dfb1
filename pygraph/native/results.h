// Results of a replay: memory for them, views of that memory, and the object that the function returns.
#pragma once

#include "arguments.h"
#include "conversions.h"
#include "kept_memory.h"
#include "pytree.h"
#include "result_memory.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/as_strided.h>

#include <string>
#include <utility>
#include <vector>

namespace pygraph {
namespace {

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
