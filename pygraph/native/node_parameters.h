// Parameters of a graph's nodes: addresses and numbers of a call are written over those of the last replay, and the
// nodes whose bytes changed are sent to the driver.
#pragma once

#include "arguments.h"
#include "captured.h"
#include "conversions.h"

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pygraph {
namespace {

// Sends the parameters of one node.
struct Commit {
  uint64_t function, executable, node, params, context;

  bool send() const {
    if (context != 0) {
      using Send = int (*)(uint64_t, uint64_t, uint64_t, uint64_t);
      return reinterpret_cast<Send>(function)(executable, node, params, context) == 0;
    }
    using Send = int (*)(uint64_t, uint64_t, uint64_t);
    return reinterpret_cast<Send>(function)(executable, node, params) == 0;
  }
};

struct PointerSlot {
  std::vector<std::pair<uint64_t*, uint64_t>> cells;  // a word of a parameter, and its distance from the address
  std::vector<int> commits;
};

struct NumberSlot {
  enum Source { Passed, InArgument, InCaptured } source;
  int index;  // among the call's numbers, the tensors among its arguments, or the captured tensors
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the tensor, which is on the host
  bool real;
  std::vector<std::pair<void*, std::string>> cells;  // bytes of a parameter, and their dtype
  std::vector<int> commits;
};

struct NodeParameters {
  std::vector<int> inputs;  // tensors among the arguments, whose addresses the first slots take
  std::vector<PointerSlot> slots;  // of inputs, then of memory for results
  std::vector<NumberSlot> numbers;
  std::vector<Commit> commits;
  int64_t* synced;  // whether the nodes have the parameters that are written here; Python reads it too
};

// ---- numbers -------------------------------------------------------------------------------------------------------

template <typename T, typename V>
bool store(void* cell, V value) {
  T encoded = static_cast<T>(value);
  if (std::memcmp(cell, &encoded, sizeof(T)) == 0) return false;
  std::memcpy(cell, &encoded, sizeof(T));
  return true;
}

// Toward zero; a number that does not fit is eager's error, and any number here.
int64_t truncated(double number) {
  return std::abs(number) < 0x1p63 ? static_cast<int64_t>(number) : 0;
}

// Whether the cell's bytes changed. The conversions of ctypes; as in eager, an integer type drops the fraction.
bool store_number(void* cell, const std::string& dtype, bool real, Number number) {
  double as_real = real ? number.real : static_cast<double>(number.integer);
  int64_t as_integer = !real ? number.integer : truncated(number.real);
  if (dtype == "float32") return store<float>(cell, as_real);
  if (dtype == "float64") return store<double>(cell, as_real);
  if (dtype == "bool") return store<bool>(cell, real ? number.real != 0 : number.integer != 0);
  if (dtype == "int64") return store<int64_t>(cell, as_integer);
  if (dtype == "int32") return store<int32_t>(cell, as_integer);
  if (dtype == "int16") return store<int16_t>(cell, as_integer);
  if (dtype == "int8") return store<int8_t>(cell, as_integer);
  return store<uint8_t>(cell, as_integer);
}

template <typename T>
Number read_as(const void* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  Number number;
  if constexpr (std::is_integral_v<T>) {
    number.integer = value;
  } else {
    number.real = value;
  }
  return number;
}

// The number in a tensor on the host, as `Tensor.item()` gives it; of the dtypes in pygraph/calls/plan_description.py.
Number read_element(const void* data, c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double: return read_as<double>(data);
    case c10::ScalarType::Float: return read_as<float>(data);
    case c10::ScalarType::Half: return read_as<c10::Half>(data);
    case c10::ScalarType::BFloat16: return read_as<c10::BFloat16>(data);
    case c10::ScalarType::Bool: return read_as<bool>(data);
    case c10::ScalarType::Long: return read_as<int64_t>(data);
    case c10::ScalarType::Int: return read_as<int32_t>(data);
    case c10::ScalarType::Short: return read_as<int16_t>(data);
    case c10::ScalarType::Char: return read_as<int8_t>(data);
    default: return read_as<uint8_t>(data);
  }
}

Number number_of(const NumberSlot& slot, const Call& call, const std::vector<CapturedTensor>& captured) {
  if (slot.source == NumberSlot::Passed) return call.numbers[slot.index];
  const bool is_argument = slot.source == NumberSlot::InArgument;
  return read_element(is_argument ? call.tensors[slot.index]->data() : captured[slot.index].now()->data(), slot.dtype);
}

// ---- a replay ------------------------------------------------------------------------------------------------------

// Write addresses and numbers that differ and send their nodes, counting them. False if the driver refused one.
bool patch(const NodeParameters& parameters, const Call& call, const std::vector<CapturedTensor>& captured,
           const std::vector<at::Tensor>& memory, int64_t& sent) {
  bool synced = *parameters.synced != 0;
  *parameters.synced = 0;  // until all is sent
  // A node may belong to several slots, and is sent once.
  c10::SmallVector<bool, 64> changed(parameters.commits.size(), false);
  for (size_t i = 0; i < parameters.slots.size(); ++i) {
    const PointerSlot& slot = parameters.slots[i];
    if (slot.cells.empty()) continue;
    uint64_t address = i < parameters.inputs.size()
        ? call.addresses[parameters.inputs[i]]
        : reinterpret_cast<uint64_t>(memory[i - parameters.inputs.size()].unsafeGetTensorImpl()->data());
    if (synced && *slot.cells[0].first == address + slot.cells[0].second) continue;
    for (auto& [cell, delta] : slot.cells) *cell = address + delta;
    for (int commit : slot.commits) changed[commit] = true;
  }
  for (const NumberSlot& slot : parameters.numbers) {
    const Number number = number_of(slot, call, captured);
    for (auto& [cell, dtype] : slot.cells) {
      if (store_number(cell, dtype, slot.real, number) || !synced) {
        for (int commit : slot.commits) changed[commit] = true;
      }
    }
  }
  for (size_t i = 0; i < changed.size(); ++i) {
    if (!changed[i]) continue;
    if (!parameters.commits[i].send()) return false;
    ++sent;
  }
  *parameters.synced = 1;
  return true;
}

// ---- their description ---------------------------------------------------------------------------------------------

PointerSlot describe_pointer(PyObject* description) {
  PointerSlot slot;
  for_each(item(description, 0), [&](PyObject* cell) {
    slot.cells.emplace_back(reinterpret_cast<uint64_t*>(to_word(item(cell, 0))), to_word(item(cell, 1)));
  });
  slot.commits = to_small_ints(item(description, 1));
  return slot;
}

// Where a number comes from: a leaf of the call, which may be a tensor, or a captured tensor.
NumberSlot describe_source(
    const ArgumentSpec& arguments, const std::vector<CapturedTensor>& captured, PyObject* description) {
  NumberSlot slot;
  const int64_t position = to_int(item(description, 1));
  if (PyUnicode_CompareWithASCIIString(item(description, 0), "computed") == 0) {
    slot.source = NumberSlot::Passed;
    slot.index = arguments.numbers + static_cast<int>(position);
    slot.real = item(description, 2) == Py_True;
    return slot;
  }
  if (PyUnicode_CompareWithASCIIString(item(description, 0), "captured") == 0) {
    slot.source = NumberSlot::InCaptured;
    slot.index = static_cast<int>(position);
    slot.dtype = captured.at(position).layout.dtype;
  } else {
    const LeafSpec& leaf = arguments.leaves.at(position);
    slot.index = leaf.index;
    slot.source = leaf.kind == LeafSpec::Tensor ? NumberSlot::InArgument : NumberSlot::Passed;
    if (leaf.kind == LeafSpec::Tensor) slot.dtype = arguments.tensors.at(leaf.index).layout.dtype;
    slot.real = leaf.kind == LeafSpec::Float;
  }
  if (slot.source == NumberSlot::Passed) return slot;
  slot.real = c10::isFloatingType(slot.dtype);
  return slot;
}

NumberSlot describe_number(
    const ArgumentSpec& arguments, const std::vector<CapturedTensor>& captured, PyObject* description) {
  NumberSlot slot = describe_source(arguments, captured, item(description, 0));
  for_each(item(description, 1), [&](PyObject* cell) {
    const char* dtype = PyUnicode_AsUTF8(item(cell, 1));
    if (dtype == nullptr) throw PythonError();
    slot.cells.emplace_back(reinterpret_cast<void*>(to_word(item(cell, 0))), dtype);
  });
  slot.commits = to_small_ints(item(description, 2));
  return slot;
}

NodeParameters describe_parameters(
    const ArgumentSpec& arguments, const std::vector<CapturedTensor>& captured, PyObject* description) {
  NodeParameters parameters;
  for (int64_t leaf : to_ints(field(description, "inputs"))) {
    parameters.inputs.push_back(arguments.leaves.at(leaf).index);
  }
  for_each(field(description, "slots"), [&](PyObject* slot) { parameters.slots.push_back(describe_pointer(slot)); });
  for_each(field(description, "numbers"), [&](PyObject* slot) {
    parameters.numbers.push_back(describe_number(arguments, captured, slot));
  });
  for_each(field(description, "commits"), [&](PyObject* commit) {
    auto word = [&](Py_ssize_t index) { return to_word(item(commit, index)); };
    parameters.commits.push_back({word(0), word(1), word(2), word(3), word(4)});
  });
  parameters.synced = reinterpret_cast<int64_t*>(to_word(field(description, "synced")));
  return parameters;
}

}  // namespace
}  // namespace pygraph
