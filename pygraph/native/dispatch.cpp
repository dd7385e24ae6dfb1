// The call path of a transformed function that has been called like this before.
//
// A Dispatcher holds Plans. A plan knows one kind of call exactly: the structure of the arguments, the layout of every
// tensor, the settings that choose kernels, and what the function has closed over. A call that a plan matches is run
// here; any other is a miss, and Python decides. A plan may be stricter than it must be, never laxer.
#include "guards.h"
#include "objects.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

// ATen/autocast_mode.h would include all of ATen. Checked with torch 2.11 and 2.13.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace {

using Clock = std::chrono::steady_clock;

PyObject* miss = nullptr;         // what a dispatcher returns when no plan matches
PyObject* inside_name = nullptr;  // "inside"

struct PythonError {};  // an exception is set

PyObject* checked(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return object;
}

int64_t to_int(PyObject* object) {
  int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value;
}

// Addresses and handles may use all 64 bits.
uint64_t to_word(PyObject* object) {
  uint64_t value = PyLong_AsUnsignedLongLongMask(object);
  if (value == static_cast<uint64_t>(-1) && PyErr_Occurred()) throw PythonError();
  return value;
}

PyObject* item(PyObject* sequence, Py_ssize_t index) {  // borrowed; only tuples are passed
  return checked(PyTuple_GetItem(sequence, index));
}

PyObject* field(PyObject* spec, const char* name) {  // borrowed
  PyObject* value = PyDict_GetItemString(spec, name);
  if (value == nullptr) {
    PyErr_SetString(PyExc_KeyError, name);
    throw PythonError();
  }
  return value;
}

std::vector<int64_t> to_ints(PyObject* sequence) {
  std::vector<int64_t> values;
  for (Py_ssize_t i = 0; i < PyTuple_Size(sequence); ++i) values.push_back(to_int(item(sequence, i)));
  if (PyErr_Occurred()) throw PythonError();
  return values;
}

// ---- settings ------------------------------------------------------------------------------------------------------

// What `pygraph.guards.torch_settings.mode_key` reads, without the device's autocast settings, which each plan compares itself.
using Settings = std::array<int64_t, 29>;

Settings current_settings() {
  using torch::autograd::AnomalyMode;
  at::Context& context = at::globalContext();
  const auto& autograd = c10::AutogradState::get_tls_state();
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  int64_t attention_order = 0;
  for (at::SDPBackend backend : context.sDPPriorityOrder()) {
    attention_order = 16 * attention_order + static_cast<int64_t>(backend) + 1;
  }
  return {
      autograd.get_grad_mode(),
      autograd.get_inference_mode(),
      static_cast<int64_t>(keys.included_.raw_repr()),
      static_cast<int64_t>(keys.excluded_.raw_repr()),
      static_cast<int64_t>(c10::get_default_dtype_as_scalartype()),
      context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(),
      context.userEnabledCuDNN(),
      context.benchmarkCuDNN(),
      context.deterministicCuDNN(),
      context.userEnabledFlashSDP(),
      context.userEnabledMemEfficientSDP(),
      context.userEnabledMathSDP(),
      context.userEnabledCuDNNSDP(),
      static_cast<int64_t>(context.allowFP16ReductionCuBLAS()),
      static_cast<int64_t>(context.allowBF16ReductionCuBLAS()),
      static_cast<int64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL)),
      static_cast<int64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV)),
      static_cast<int64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN)),
      static_cast<int64_t>(at::impl::PythonTorchFunctionTLS::get_disabled_state()),
      context.allowFP16AccumulationCuBLAS(),
      context.allowFP16BF16ReductionMathSDP(),
      context.userEnabledOverrideableSDP(),
      context.userEnabledFA3SDP(),
      attention_order,
      static_cast<int64_t>(context.linalgPreferredBackend()),
      static_cast<int64_t>(context.blasPreferredBackend()),
      context.deterministicFillUninitializedMemory(),
      AnomalyMode::is_enabled() && AnomalyMode::should_check_nan(),
  };
}

// Whether something watches or changes every operation, so that a call is not what it was when it was planned.
bool under_mode() {
  return at::impl::PythonTorchFunctionTLS::stack_len() != 0 || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

int64_t autocast_dtype(at::DeviceType type) {
  return at::autocast::is_autocast_enabled(type) ? static_cast<int64_t>(at::autocast::get_autocast_dtype(type)) : -1;
}

// ---- arguments -----------------------------------------------------------------------------------------------------

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kWidestLoad = 16;

// As `placement` in pygraph/runtime/body.py.
uint64_t placement_of(uint64_t address) {
  if (address % kWidestLoad != 0) return address % kWidestLoad;
  return address % kAlignment == 0 ? kAlignment : address & (~address + 1);
}

struct Node {  // of the structure of (args, kwargs), before its children
  enum Kind { Tuple, List, Dict, Leaf } kind;
  Py_ssize_t size = 0;
  std::vector<PyObject*> keys;  // borrowed from the plan
};

struct Leaf {
  enum Kind { Tensor, Integer, Float, Same, Equal, EqualFloat } kind;
  PyTypeObject* type;              // borrowed from the plan
  PyObject* value = nullptr;       // static leaves; borrowed from the plan
  uint64_t bits = 0;               // static floats
  int slot = 0;                    // position among tensors, or among live numbers
};

bool equal(c10::IntArrayRef a, c10::IntArrayRef b) {  // inline, since a tensor has few dimensions
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
        tensor.device() == device && equal(tensor.sizes(), sizes) && equal(tensor.strides(), strides);
  }
};

// As its own method, which is two calls through tables; only of a view is there more to ask than what lies here.
bool requires_grad(const c10::TensorImpl& tensor) {
  auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  if (meta == nullptr) return false;
  return meta->is_view_ ? tensor.requires_grad() : meta->requires_grad_ || meta->grad_fn_ != nullptr;
}

using Range = std::pair<uint64_t, uint64_t>;  // the first address, and the one after the last

Range range_of(const c10::TensorImpl& tensor) {  // of the storage
  const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  auto start = reinterpret_cast<uint64_t>(storage->data());
  return {start, start + storage->nbytes()};
}

// How memory is freed that a device's allocator gave, so that nothing else overlaps it; nullptr if that cannot be said.
c10::DeleterFnPtr deleter_of(c10::DeviceType type) {
  if (type != c10::kCPU && type != c10::kCUDA) return nullptr;  // others may have no allocator, which is an error
  try {
    c10::DeleterFnPtr deleter = c10::GetAllocator(type)->raw_deleter();
    return deleter == &c10::detail::deleteNothing ? nullptr : deleter;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Whether a storage may stand for memory that others stand for as well, as one made by DLPack.
bool is_foreign(const c10::TensorImpl& tensor, c10::DeleterFnPtr deleter) {
  return tensor.unsafe_storage().unsafeGetStorageImpl()->data_ptr().get_deleter() != deleter;
}

struct TensorSpec {
  Layout layout;
  bool grad;           // requires it, also under no_grad: a function may ask for it, or enable gradients inside
  bool host;           // graphs read it through a copy: its alignment does not matter
  bool empty;          // has no memory to share
  c10::DeleterFnPtr deleter = nullptr;  // of its device's allocator
  uint64_t placement;
  int first = -1;      // the first tensor leaf with the same storage: itself if there is no other
  int same = -1;       // the first tensor leaf that is the same object
  int64_t distance = 0;

  explicit TensorSpec(const c10::TensorImpl& tensor) : layout(tensor) {}
};

// What mutable_data() gives (a lazily cloned tensor gets memory of its own), without asking whether there is a storage.
uint64_t address_of(const c10::TensorImpl& tensor) {
  if (tensor.is_empty()) return 0;
  c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  auto* start = static_cast<char*>(storage->mutable_data());
  return reinterpret_cast<uint64_t>(start + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()));
}

struct CapturedSpec {
  PyObject* object;         // borrowed from the plan
  const c10::TensorImpl* tensor;
  uint64_t address;         // where graphs read it
  bool placed;              // whether that matters
  Layout layout;
  bool grad;

  bool fits() const {
    c10::TensorImpl* now = THPVariable_Unpack(object).unsafeGetTensorImpl();
    if (now != tensor || !layout.fits(*now) || requires_grad(*now) != grad) return false;
    return !placed || address_of(*now) == address;
  }
};

union Number {
  int64_t integer;
  double real;
};

// What a call gives to the plan that matches it.
struct Call {
  c10::SmallVector<PyObject*, 40> leaves;    // owned: while Python code runs, a list may lose what it had
  c10::SmallVector<c10::TensorImpl*, 40> tensors;
  c10::SmallVector<uint64_t, 40> addresses;  // by tensor
  c10::SmallVector<const void*, 40> storages;
  bool foreign = false;  // whether storages may overlap that begin at different addresses
  c10::SmallVector<Number, 8> numbers;

  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { clear(); }

  void add(PyObject* leaf) {
    Py_INCREF(leaf);
    leaves.push_back(leaf);
  }

  void clear() {
    tensors.clear();
    addresses.clear();
    storages.clear();
    foreign = false;
    numbers.clear();
    for (PyObject* leaf : leaves) Py_DECREF(leaf);
    leaves.clear();
  }
};

// ---- replay --------------------------------------------------------------------------------------------------------

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

struct Slot {
  std::vector<std::pair<uint64_t*, uint64_t>> cells;  // where, and what is added to the address
  std::vector<int> commits;
};

struct NumberSlot {
  int number;           // among the call's live numbers
  bool real;
  std::vector<std::pair<void*, std::string>> cells;  // where, and as which dtype
  std::vector<int> commits;
};

struct Fresh {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  c10::Allocator* allocator;         // nullptr where a device makes tensors in a way of its own

  // What torch does (2.11 and 2.13), without asking the dispatcher who does it, which takes half as long again.
  at::Tensor make(bool filled) const {
    if (allocator == nullptr || filled) return at::empty_strided(sizes, strides, options);
    const c10::DispatchKeySet keys(options.computeDispatchKey());
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return at::Tensor(at::detail::empty_strided_generic(sizes, strides, allocator, keys, dtype));
  }
};

struct Output {
  int fresh;
  bool whole;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

struct ResultLeaf {
  enum Kind { FromOutput, Static, Argument, Repeat } kind;
  int index = 0;
  PyObject* value = nullptr;  // borrowed from the plan
};

template <typename T, typename V>
bool store(void* cell, V value) {
  T encoded = static_cast<T>(value);
  if (std::memcmp(cell, &encoded, sizeof(T)) == 0) return false;
  std::memcpy(cell, &encoded, sizeof(T));
  return true;
}

// Toward zero; what does not fit is eager's error, and any number here.
int64_t truncated(double number) {
  return std::abs(number) < 0x1p63 ? static_cast<int64_t>(number) : 0;
}

// Whether the cell's bytes changed. The same conversions as of ctypes; as in eager, an integer type drops the fraction.
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

// The stream of the last replay, which is the only one on which nothing has to be waited for.
struct LastStream {
  int64_t* raw;
  uint64_t is_capturing;
  PyObject* current;                 // borrowed from the plan; called with the device's index
  PyObject* device_index;            // borrowed from the plan
};

struct Replay {
  std::vector<int> inputs;           // tensor of each of the first slots
  std::vector<Fresh> fresh;          // the rest of the slots
  std::vector<Slot> slots;
  std::vector<NumberSlot> numbers;
  std::vector<Commit> commits;
  int64_t* synced;
  uint64_t launch, executable;
  PyObject* launcher = nullptr;      // borrowed from the plan; replays where torch prepares the replay, in Python
  PyObject* ready = nullptr;         // borrowed from the plan; whether the launcher would replay now
  std::vector<int> updated;          // tensors among the arguments whose versions a replay moves
  std::vector<int> updated_captured; // the same among captured tensors
  std::vector<Output> outputs;
  std::vector<ResultLeaf> results;
  std::vector<Node> shape;           // of what is returned
  PyObject* unflatten = nullptr;     // borrowed from the plan; makes that of a list of all leaves where it has no shape
};

// ---- the types -----------------------------------------------------------------------------------------------------

enum class Way { Replay, Executable, Function };

struct PlanState {
  PyObject* keep = nullptr;          // owned list: everything that is borrowed elsewhere in here
  bool dead = false;
  Way way;
  std::optional<at::DeviceType> accelerator;
  Settings settings;
  int64_t accelerator_autocast, cpu_autocast;
  int device_index = -1;             // the device that must be current; -1 if it does not matter
  std::vector<Node> nodes;
  std::vector<Leaf> leaves;
  std::vector<TensorSpec> tensors;
  int numbers = 0;
  bool shares = false;               // whether any two tensor leaves share memory
  std::vector<CapturedSpec> captured;
  std::vector<Range> owned;          // memory of captured tensors that no argument may share, sorted and apart
  pygraph::Environment environment;
  PyObject* run = nullptr;           // borrowed: the executable or the function
  std::optional<LastStream> stream;
  std::optional<Replay> replay;
  std::vector<int> released;         // leaves that nothing reads, by their index in the list that is the first argument
  bool as_it_is = false;             // whether the function itself runs, which is right whatever the guards say
  Clock::time_point look_again;      // when to compare its guards again, which say whether it may be a graph now
  int64_t hits = 0, stamp = 0, patches = 0;
};

struct PlanObject {
  PyObject_HEAD
  PlanState* state;
};

struct DispatcherObject {
  PyObject_HEAD
  PyObject* acquire;
  PyObject* release;
  PyObject* here;
  std::vector<PlanObject*>* plans;   // most recently used first
  int64_t clock;
  bool profiling;
  std::array<double, 5>* profile;    // ns: guards, turn, allocation, patches, launch
};

PyTypeObject* plan_type = nullptr;

// ---- matching ------------------------------------------------------------------------------------------------------

bool leaf_fits(PlanState& plan, const Leaf& leaf, PyObject* object, Call& call) {
  switch (leaf.kind) {
    case Leaf::Tensor: {
      if (Py_TYPE(object) != leaf.type) return false;
      c10::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
      const TensorSpec& spec = plan.tensors[leaf.slot];
      if (!spec.layout.fits(*tensor) || requires_grad(*tensor) != spec.grad) return false;
      uint64_t address = 0;
      if (!spec.empty) {
        // mutable_data also gives a lazily cloned tensor memory of its own, as Tensor.data_ptr() does.
        address = reinterpret_cast<uint64_t>(spec.host ? tensor->data() : tensor->mutable_data());
      }
      if (!spec.host && placement_of(address) != spec.placement) return false;
      call.tensors.push_back(tensor);
      call.addresses.push_back(address);
      call.storages.push_back(tensor->unsafe_storage().unsafeGetStorageImpl()->data());
      if (!spec.empty && is_foreign(*tensor, spec.deleter)) call.foreign = true;
      break;
    }
    case Leaf::Integer: {
      if (Py_TYPE(object) != leaf.type) return false;
      int overflow = 0;
      Number number;
      if (PyLong_Check(object)) {
        number.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
      } else {
        PyObject* index = PyNumber_Index(object);
        if (index == nullptr) {
          PyErr_Clear();
          return false;
        }
        number.integer = PyLong_AsLongLongAndOverflow(index, &overflow);
        Py_DECREF(index);
      }
      if (overflow != 0) return false;
      call.numbers.push_back(number);
      break;
    }
    case Leaf::Float: {
      if (Py_TYPE(object) != leaf.type) return false;
      Number number;
      number.real = PyFloat_AsDouble(object);
      if (number.real == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
      }
      if (!std::isfinite(number.real)) return false;
      call.numbers.push_back(number);
      break;
    }
    case Leaf::Same:
      if (object != leaf.value) return false;
      break;
    case Leaf::Equal: {  // int or str, exactly: comparing them runs no code of anybody's
      if (object != leaf.value) {
        if (Py_TYPE(object) != leaf.type) return false;
        int equal = PyObject_RichCompareBool(object, leaf.value, Py_EQ);
        if (equal < 0) PyErr_Clear();
        if (equal != 1) return false;
      }
      break;
    }
    case Leaf::EqualFloat: {
      if (Py_TYPE(object) != leaf.type) return false;
      double value = PyFloat_AS_DOUBLE(object);
      uint64_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      if (bits != leaf.bits) return false;
      break;
    }
  }
  call.add(object);
  return true;
}

bool walk(PlanState& plan, size_t& position, PyObject* object, Call& call) {
  const Node& node = plan.nodes[position++];
  switch (node.kind) {
    case Node::Leaf:
      return leaf_fits(plan, plan.leaves[call.leaves.size()], object, call);
    case Node::Tuple:
    case Node::List:
      if (Py_TYPE(object) != (node.kind == Node::Tuple ? &PyTuple_Type : &PyList_Type)) return false;
      if (PySequence_Fast_GET_SIZE(object) != node.size) return false;
      for (Py_ssize_t i = 0; i < node.size; ++i) {
        if (i >= PySequence_Fast_GET_SIZE(object)) return false;  // a list may change while a number is read
        if (!walk(plan, position, PySequence_Fast_GET_ITEM(object, i), call)) return false;
      }
      return true;
    case Node::Dict: {
      if (Py_TYPE(object) != &PyDict_Type || PyDict_GET_SIZE(object) != node.size) return false;
      Py_ssize_t cursor = 0, index = 0;
      PyObject *key, *value;
      while (PyDict_Next(object, &cursor, &key, &value)) {
        if (index >= node.size) return false;
        PyObject* expected = node.keys[index++];
        bool same = key == expected ||
            (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(expected) && PyUnicode_Compare(key, expected) == 0);
        if (!same || !walk(plan, position, value, call)) return false;
      }
      return index == node.size;
    }
  }
  return false;
}

// For every tensor leaf: the first one with the same memory, the first one that is the same object, and how far apart.
template <typename Visit>
bool compare_sharing(const PlanState& plan, const Call& call, Visit visit) {
  size_t count = call.tensors.size();
  // Open addressing, at most half full; linear for a handful.
  c10::SmallVector<int, 128> table;
  size_t mask = 0;
  constexpr size_t kLinear = 6;
  if (count > kLinear) {
    size_t size = 16;
    while (size < 2 * count) size *= 2;
    table.assign(size, -1);
    mask = size - 1;
  }
  for (size_t i = 0; i < count; ++i) {
    if (plan.tensors[i].empty) continue;
    int first = -1;
    if (count <= kLinear) {
      for (size_t j = 0; j < i; ++j) {
        if (!plan.tensors[j].empty && call.storages[j] == call.storages[i]) {
          first = static_cast<int>(j);
          break;
        }
      }
    } else {
      size_t place = (reinterpret_cast<uint64_t>(call.storages[i]) * 0x9E3779B97F4A7C15ull >> 32) & mask;
      while (table[place] >= 0 && call.storages[table[place]] != call.storages[i]) place = (place + 1) & mask;
      first = table[place];
      if (first < 0) table[place] = static_cast<int>(i);
    }
    int same = static_cast<int>(i);
    int64_t distance = 0;
    if (first >= 0) {
      distance = static_cast<int64_t>(call.addresses[i] - call.addresses[first]);
      for (size_t j = first; j < i; ++j) {
        if (call.tensors[j] == call.tensors[i]) {
          same = static_cast<int>(j);
          break;
        }
      }
    }
    if (!visit(i, first < 0 ? static_cast<int>(i) : first, same, distance)) return false;
  }
  return true;
}

// Whether storages overlap that begin at different addresses, which `compare_sharing` does not see. Only Python knows
// what to do with those.
bool overlaps_unseen(const PlanState& plan, const Call& call) {
  c10::SmallVector<Range, 40> ranges;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    if (!plan.tensors[i].empty) ranges.push_back(range_of(*call.tensors[i]));
  }
  std::sort(ranges.begin(), ranges.end());
  Range last{0, 0};
  for (const Range& range : ranges) {
    if (range.first < last.second && range.first != last.first) return true;
    last = {range.first, std::max(last.second, range.second)};
  }
  return false;
}

// Whether a tensor shares memory with a captured one while one of the two is written.
bool meets_owned(const PlanState& plan, const Call& call) {
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    if (plan.tensors[i].empty) continue;
    auto [start, end] = range_of(*call.tensors[i]);
    auto after = std::lower_bound(plan.owned.begin(), plan.owned.end(), Range{end, 0});
    if (after != plan.owned.begin() && std::prev(after)->second > start) return true;
  }
  return false;
}

// What the guards of many modules cost must not be added to every call that runs as it is: after some calls, comparing them
// may take a thousandth of the time, and they are compared again within a second. Cheap ones always are.
constexpr int64_t kLooks = 32;
constexpr auto kCheap = std::chrono::microseconds(2);
constexpr auto kLongest = std::chrono::milliseconds(1);

bool is_current(PlanState& plan) {
  if (!plan.as_it_is || plan.hits < kLooks) return plan.environment.current();
  const auto begin = Clock::now();
  if (begin < plan.look_again) return true;
  const bool current = plan.environment.current();
  const auto end = Clock::now();
  const Clock::duration spent = end - begin;
  if (spent > kCheap) plan.look_again = end + 1000 * std::min<Clock::duration>(spent, kLongest);
  return current;
}

bool matches(PlanState& plan, PyObject* args, PyObject* kwargs, const Settings& settings, Call& call) {
  if (plan.dead || settings != plan.settings) return false;
  if (autocast_dtype(at::kCPU) != plan.cpu_autocast) return false;
  if (plan.accelerator && autocast_dtype(*plan.accelerator) != plan.accelerator_autocast) return false;
  size_t position = 0;
  if (!walk(plan, position, args, call) || !walk(plan, position, kwargs, call)) return false;
  if (call.tensors.size() > 1) {
    bool fits = compare_sharing(plan, call, [&](size_t i, int first, int same, int64_t distance) {
      const TensorSpec& spec = plan.tensors[i];
      return spec.first == first && spec.same == same && spec.distance == distance;
    });
    if (!fits || (call.foreign && overlaps_unseen(plan, call))) return false;
  }
  if (!plan.owned.empty() && meets_owned(plan, call)) return false;
  for (const CapturedSpec& spec : plan.captured) {
    if (!spec.fits()) return false;
  }
  if (plan.device_index >= 0) {
    c10::impl::VirtualGuardImpl guard(*plan.accelerator);
    if (guard.getDevice().index() != plan.device_index) return false;
  }
  return is_current(plan);
}

// ---- running -------------------------------------------------------------------------------------------------------

struct Stopwatch {
  DispatcherObject* dispatcher;
  Clock::time_point last;

  explicit Stopwatch(DispatcherObject* dispatcher) : dispatcher(dispatcher) {
    if (dispatcher->profiling) last = Clock::now();
  }

  void lap(int part) {
    if (!dispatcher->profiling) return;
    auto now = Clock::now();
    (*dispatcher->profile)[part] += std::chrono::duration<double, std::nano>(now - last).count();
    last = now;
  }
};

// The raw current stream; nothing if it is not the one of the last replay, or is being captured.
std::optional<uint64_t> replay_stream(const LastStream& last) {
  PyObject* stream = PyObject_CallOneArg(last.current, last.device_index);
  if (stream == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  uint64_t raw = PyLong_AsUnsignedLongLongMask(stream);
  Py_DECREF(stream);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (static_cast<int64_t>(raw) != *last.raw) return std::nullopt;
  if (last.is_capturing != 0) {
    int status = 0;
    if (reinterpret_cast<int (*)(uint64_t, int*)>(last.is_capturing)(raw, &status) != 0 || status != 0) {
      return std::nullopt;
    }
  }
  return raw;
}

// Write what differs and send the nodes that it belongs to. False if the driver refused one.
bool patch(Replay& replay, PlanState& plan, const Call& call, const std::vector<at::Tensor>& fresh) {
  bool synced = *replay.synced != 0;
  *replay.synced = 0;  // until all is sent
  // A node may belong to several slots, and is sent once.
  c10::SmallVector<bool, 64> changed(replay.commits.size(), false);
  for (size_t i = 0; i < replay.slots.size(); ++i) {
    const Slot& slot = replay.slots[i];
    if (slot.cells.empty()) continue;
    uint64_t address = i < replay.inputs.size()
        ? call.addresses[replay.inputs[i]]
        : reinterpret_cast<uint64_t>(fresh[i - replay.inputs.size()].unsafeGetTensorImpl()->data());
    if (synced && *slot.cells[0].first == address + slot.cells[0].second) continue;
    for (auto& [cell, delta] : slot.cells) *cell = address + delta;
    for (int commit : slot.commits) changed[commit] = true;
  }
  for (const NumberSlot& slot : replay.numbers) {
    for (auto& [cell, dtype] : slot.cells) {
      if (store_number(cell, dtype, slot.real, call.numbers[slot.number]) || !synced) {
        for (int commit : slot.commits) changed[commit] = true;
      }
    }
  }
  for (size_t i = 0; i < changed.size(); ++i) {
    if (!changed[i]) continue;
    if (!replay.commits[i].send()) return false;
    ++plan.patches;
  }
  *replay.synced = 1;
  return true;
}

// The container at a node, of leaves that are taken over; nullptr with an exception.
PyObject* build(const std::vector<Node>& shape, size_t& position, std::vector<PyObject*>& leaves, size_t& leaf) {
  const Node& node = shape[position++];
  if (node.kind == Node::Leaf) return std::exchange(leaves[leaf++], nullptr);
  PyObject* made = node.kind == Node::Tuple ? PyTuple_New(node.size)
      : node.kind == Node::List             ? PyList_New(node.size)
                                            : PyDict_New();
  if (made == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < node.size; ++i) {
    PyObject* child = build(shape, position, leaves, leaf);
    bool added = child != nullptr;
    if (added && node.kind == Node::Dict) {
      added = PyDict_SetItem(made, node.keys[i], child) == 0;
      Py_DECREF(child);
    } else if (added && node.kind == Node::Tuple) {
      PyTuple_SET_ITEM(made, i, child);
    } else if (added) {
      PyList_SET_ITEM(made, i, child);
    }
    if (!added) {
      Py_DECREF(made);
      return nullptr;
    }
  }
  return made;
}

PyObject* assemble(const Replay& replay, const Call& call, const std::vector<at::Tensor>& outputs) {
  size_t count = replay.results.size();
  std::vector<PyObject*> out(count, nullptr);
  auto drop = [&] {
    for (PyObject* object : out) Py_XDECREF(object);
  };
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < count; ++i) {
      const ResultLeaf& leaf = replay.results[i];
      if ((leaf.kind == ResultLeaf::Repeat) != (round == 1)) continue;
      switch (leaf.kind) {
        case ResultLeaf::FromOutput: out[i] = THPVariable_Wrap(outputs[leaf.index]); break;
        case ResultLeaf::Static: out[i] = Py_NewRef(leaf.value); break;
        case ResultLeaf::Argument: out[i] = Py_NewRef(call.leaves[leaf.index]); break;
        case ResultLeaf::Repeat: out[i] = Py_XNewRef(out[leaf.index]); break;
      }
      if (out[i] == nullptr) {
        drop();
        throw PythonError();
      }
    }
  }
  if (replay.unflatten == nullptr) {
    size_t node = 0, leaf = 0;
    PyObject* result = build(replay.shape, node, out, leaf);
    if (result == nullptr) {
      drop();
      throw PythonError();
    }
    return result;
  }
  PyObject* all = PyList_New(count);
  if (all == nullptr) {
    drop();
    throw PythonError();
  }
  for (size_t i = 0; i < count; ++i) PyList_SET_ITEM(all, i, out[i]);
  PyObject* result = PyObject_CallOneArg(replay.unflatten, all);
  Py_DECREF(all);
  return checked(result);
}

bool says_yes(PyObject* callable) {
  PyObject* answer = checked(PyObject_CallNoArgs(callable));
  Py_DECREF(answer);
  return answer == Py_True;
}

// Let go of what the call was passed and nothing reads, so that results can have its memory. Nobody can make the same
// call again: from here on it ends in a result or in an error.
void give_up(const PlanState& plan, Call& call, PyObject* args) {
  // In reverse: an allocator that hands out first what came back last then finds the same place for the same result.
  for (auto index = plan.released.rbegin(); index != plan.released.rend(); ++index) {
    Py_SETREF(call.leaves[*index], Py_NewRef(Py_None));
    if (PyList_SetItem(PyTuple_GET_ITEM(args, 0), *index, Py_NewRef(Py_None)) < 0) throw PythonError();
  }
}

// Launch the graph; false if that was refused. In Python other code may run, as a collection, but this is the function's
// turn, and the thread is marked as inside of it.
bool launch(Replay& replay, uint64_t stream) {
  int64_t synced = *replay.synced;
  *replay.synced = 0;  // until it is launched
  if (replay.launcher != nullptr) {
    if (!says_yes(replay.launcher)) return false;
  } else {
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = reinterpret_cast<int (*)(uint64_t, uint64_t)>(replay.launch)(replay.executable, stream);
    Py_END_ALLOW_THREADS
    if (status != 0) return false;
  }
  *replay.synced = synced;
  return true;
}

// The memory of the results. Empty if it cannot be had, and Python is to meet the same and say what it is.
std::vector<at::Tensor> allocate(const PlanState& plan) {
  std::vector<at::Tensor> fresh;
  fresh.reserve(plan.replay->fresh.size());
  const at::Context& context = at::globalContext();
  const bool filled = context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
  try {
    for (const Fresh& memory : plan.replay->fresh) fresh.push_back(memory.make(filled));
  } catch (const std::exception&) {
    if (!plan.released.empty()) {
      torch::translate_exception_to_python(std::current_exception());
      throw PythonError();
    }
    PyErr_Clear();
    fresh.clear();
  }
  return fresh;
}

// The result, or nullptr without an exception if Python must do it. From the first patch to the launch no Python code
// runs, so that nothing can come between.
PyObject* run_replay(PlanState& plan, Call& call, PyObject* args, Stopwatch& watch) {
  Replay& replay = *plan.replay;
  auto stream = replay_stream(*plan.stream);
  if (!stream) return nullptr;
  if (replay.ready != nullptr && (!says_yes(replay.ready) || plan.dead)) return nullptr;
  watch.lap(1);
  c10::AutoGradMode no_grad(false);
  give_up(plan, call, args);
  auto refused = [&](const char* what) -> PyObject* {
    if (plan.released.empty()) return nullptr;
    PyErr_Format(PyExc_RuntimeError, "pygraph: %s, after the call had released tensors that it replaces", what);
    throw PythonError();
  };
  std::vector<at::Tensor> fresh = allocate(plan);
  if (fresh.size() < replay.fresh.size()) return nullptr;
  // A device whose allocator is written in Python may do anything.
  if (plan.dead) return refused("the graph was released while memory for its results was allocated");
  watch.lap(2);
  if (!patch(replay, plan, call, fresh)) return refused("the driver refused to update a node of the graph");
  watch.lap(3);
  if (!launch(replay, *stream)) return refused("the graph could not be launched");
  watch.lap(4);
  // Autograd must notice that what it may have saved is another value now.
  auto tell = [](c10::TensorImpl* tensor) {
    if (!tensor->is_inference()) tensor->bump_version();
  };
  for (int tensor : replay.updated) tell(call.tensors[tensor]);
  for (int index : replay.updated_captured) {
    tell(THPVariable_Unpack(plan.captured[index].object).unsafeGetTensorImpl());
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(replay.outputs.size());
  for (const Output& output : replay.outputs) {
    const at::Tensor& memory = fresh[output.fresh];
    outputs.push_back(output.whole ? memory : at::as_strided(memory, output.sizes, output.strides, output.offset));
  }
  return assemble(replay, call, outputs);
}

PyObject* call_executable(PlanState& plan, const Call& call) {
  PyObject* leaves = checked(PyList_New(call.leaves.size()));
  for (size_t i = 0; i < call.leaves.size(); ++i) PyList_SET_ITEM(leaves, i, Py_NewRef(call.leaves[i]));
  PyObject* result = PyObject_CallOneArg(plan.run, leaves);
  Py_DECREF(leaves);
  return checked(result);
}

// The function's turn: its lock, if nobody has it, and the mark that this thread is inside a call.
class Turn {
 public:
  explicit Turn(DispatcherObject* dispatcher) : dispatcher_(dispatcher) {
    PyObject* got = checked(PyObject_CallOneArg(dispatcher->acquire, Py_False));
    taken = got == Py_True;
    Py_DECREF(got);
  }

  // For what may run Python code.
  void mark() {
    if (PyObject_SetAttr(dispatcher_->here, inside_name, Py_True) < 0) throw PythonError();
    marked_ = true;
  }

  ~Turn() {
    if (!taken) return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (marked_ && PyObject_SetAttr(dispatcher_->here, inside_name, Py_False) < 0) PyErr_WriteUnraisable(nullptr);
    PyObject* done = PyObject_CallNoArgs(dispatcher_->release);
    if (done == nullptr) PyErr_WriteUnraisable(nullptr);
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
  }

  bool taken;

 private:
  DispatcherObject* dispatcher_;
  bool marked_ = false;
};

bool is_inside(DispatcherObject* self) {
  PyObject* inside = checked(PyObject_GetAttr(self->here, inside_name));
  bool answer = inside != Py_False;
  Py_DECREF(inside);
  return answer;
}

void count(DispatcherObject* self, PlanState& plan) {
  ++plan.hits;
  plan.stamp = ++self->clock;
}

PyObject* run_plan(DispatcherObject* self, PlanState& plan, Call& call, PyObject* args, PyObject* kwargs,
                   Stopwatch& watch) {
  if (plan.way == Way::Function) {
    count(self, plan);
    return checked(PyObject_Call(plan.run, args, kwargs));
  }
  Turn turn(self);
  if (!turn.taken || plan.dead) return Py_NewRef(miss);
  if (plan.way == Way::Replay) {
    if (plan.replay->launcher != nullptr || !plan.released.empty()) turn.mark();
    PyObject* result = run_replay(plan, call, args, watch);
    if (result == nullptr) return Py_NewRef(miss);
    count(self, plan);
    return result;
  }
  if (plan.stream && !replay_stream(*plan.stream)) return Py_NewRef(miss);
  turn.mark();
  give_up(plan, call, args);
  PyObject* result = call_executable(plan, call);
  count(self, plan);
  return result;
}

PlanObject* find(DispatcherObject* self, PyObject* args, PyObject* kwargs, Call& call) {
  if (self->plans->empty() || under_mode()) return nullptr;
  Settings settings = current_settings();
  // By position: what a guard compares may run code that changes the list.
  for (size_t i = 0; i < self->plans->size(); ++i) {
    PlanObject* plan = (*self->plans)[i];
    Py_INCREF(plan);
    call.clear();
    bool fits = false;
    try {
      fits = matches(*plan->state, args, kwargs, settings, call);
    } catch (const std::exception&) {  // a tensor that has no address, for one
    }
    if (fits) {
      if (i != 0 && i < self->plans->size() && (*self->plans)[i] == plan) {
        std::rotate(self->plans->begin(), self->plans->begin() + i, self->plans->begin() + i + 1);
      }
      return plan;
    }
    Py_DECREF(plan);
  }
  return nullptr;
}

// Run `body`, with C++ exceptions as Python ones.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const PythonError&) {
    return nullptr;
  } catch (python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

bool takes_call(PyObject* const* arguments, Py_ssize_t count) {
  if (count == 2 && PyTuple_Check(arguments[0]) && PyDict_Check(arguments[1])) return true;
  PyErr_SetString(PyExc_TypeError, "expected (args: tuple, kwargs: dict)");
  return false;
}

PyObject* dispatcher_dispatch(PyObject* object, PyObject* const* arguments, Py_ssize_t nargs) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  if (!takes_call(arguments, nargs)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (self->plans->empty() || is_inside(self)) return Py_NewRef(miss);
    Stopwatch watch(self);
    Call call;
    PlanObject* plan = find(self, arguments[0], arguments[1], call);
    if (plan == nullptr) return Py_NewRef(miss);
    watch.lap(0);
    PyObject* result = nullptr;
    try {
      result = run_plan(self, *plan->state, call, arguments[0], arguments[1], watch);
    } catch (...) {
      Py_DECREF(plan);
      throw;
    }
    Py_DECREF(plan);
    return result;
  });
}

PyObject* dispatcher_match(PyObject* object, PyObject* const* arguments, Py_ssize_t nargs) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  if (!takes_call(arguments, nargs)) return nullptr;
  return guarded([&]() -> PyObject* {
    Call call;
    PlanObject* plan = find(self, arguments[0], arguments[1], call);
    if (plan == nullptr) return Py_NewRef(Py_None);
    return reinterpret_cast<PyObject*>(plan);
  });
}

// ---- making plans --------------------------------------------------------------------------------------------------

void hold(PlanState& plan, PyObject* object) {
  if (PyList_Append(plan.keep, object) < 0) throw PythonError();
}

// Describe a container with all that is in it, whose keys the caller keeps; what is no container goes to `add`.
template <typename Add>
void describe_shape(std::vector<Node>& shape, PyObject* object, Add add) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyTuple_Type || type == &PyList_Type) {
    Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    shape.push_back({type == &PyTuple_Type ? Node::Tuple : Node::List, size, {}});
    for (Py_ssize_t i = 0; i < size; ++i) describe_shape(shape, PySequence_Fast_GET_ITEM(object, i), add);
  } else if (type == &PyDict_Type) {
    Node node{Node::Dict, PyDict_GET_SIZE(object), {}};
    Py_ssize_t cursor = 0;
    PyObject *key, *value;
    while (PyDict_Next(object, &cursor, &key, &value)) node.keys.push_back(key);
    shape.push_back(std::move(node));
    cursor = 0;
    while (PyDict_Next(object, &cursor, &key, &value)) describe_shape(shape, value, add);
  } else {
    shape.push_back({Node::Leaf, 0, {}});
    add(object);
  }
}

// Describe a leaf of (args, kwargs); `live` says which are numbers that are read at every call.
void describe_leaf(PlanState& plan, PyObject* object, PyObject* live, Call& call) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject* index = checked(PyLong_FromSize_t(call.leaves.size()));
  int is_live = PySet_Contains(live, index);
  Py_DECREF(index);
  if (is_live < 0) throw PythonError();
  Leaf leaf{Leaf::Same, type};
  hold(plan, reinterpret_cast<PyObject*>(type));
  if (THPVariable_Check(object)) {
    leaf.kind = Leaf::Tensor;
    leaf.slot = static_cast<int>(call.tensors.size());
    c10::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
    TensorSpec spec(*tensor);
    spec.grad = tensor->requires_grad();
    spec.host = tensor->is_cpu();
    spec.empty = tensor->numel() == 0;
    uint64_t address = 0;
    if (!spec.empty) address = reinterpret_cast<uint64_t>(spec.host ? tensor->data() : tensor->mutable_data());
    spec.placement = placement_of(address);
    spec.deleter = deleter_of(tensor->device_type());
    plan.tensors.push_back(spec);
    call.tensors.push_back(tensor);
    call.addresses.push_back(address);
    call.storages.push_back(tensor->unsafe_storage().unsafeGetStorageImpl()->data());
  } else if (is_live) {
    leaf.kind = PyFloat_Check(object) || !PyIndex_Check(object) ? Leaf::Float : Leaf::Integer;
    leaf.slot = plan.numbers++;
  } else {
    leaf.value = object;
    hold(plan, object);
    if (type == &PyFloat_Type) {
      leaf.kind = Leaf::EqualFloat;
      double value = PyFloat_AS_DOUBLE(object);
      std::memcpy(&leaf.bits, &value, sizeof(value));
    } else if (type == &PyLong_Type || type == &PyUnicode_Type) {
      leaf.kind = Leaf::Equal;
    }
  }
  plan.leaves.push_back(leaf);
  call.add(object);
}

void describe_environment(PlanState& plan, PyObject* spec) {
  // (dicts, lists, cells, items, same, sets, code, attributes); entries are (key, value, by_value), or (key,) for nothing
  auto expected = [&](PyObject* entry) {
    PyObject* key = item(entry, 0);
    hold(plan, key);
    if (PyTuple_Size(entry) == 1) return pygraph::Expected{key, nullptr, false};
    PyObject* value = item(entry, 1);
    return pygraph::Expected{key, Py_NewRef(value), item(entry, 2) == Py_True};
  };
  pygraph::Environment& environment = plan.environment;
  environment.same = Py_NewRef(item(spec, 4));
  PyObject* dicts = item(spec, 0);
  for (Py_ssize_t i = 0; i < PyTuple_Size(dicts); ++i) {
    PyObject* entry = item(dicts, i);
    auto* guard = new pygraph::DictGuard();
    guard->dict = Py_NewRef(item(entry, 0));
    environment.dicts.push_back(guard);
    guard->length = to_int(item(entry, 1));
    PyObject* entries = item(entry, 2);
    for (Py_ssize_t j = 0; j < PyTuple_Size(entries); ++j) guard->entries.push_back(expected(item(entries, j)));
    guard->ordered = item(entry, 3) == Py_True;
    guard->module = item(entry, 4) == Py_True;
  }
  PyObject* lists = item(spec, 1);
  for (Py_ssize_t i = 0; i < PyTuple_Size(lists); ++i) {
    PyObject* entry = item(lists, i);
    environment.lists.emplace_back();
    pygraph::ListGuard& guard = environment.lists.back();
    guard.list = Py_NewRef(item(entry, 0));
    guard.length = to_int(item(entry, 1));
    PyObject* entries = item(entry, 2);
    for (Py_ssize_t j = 0; j < PyTuple_Size(entries); ++j) {
      PyObject* one = item(entries, j);
      guard.entries.emplace_back(to_int(item(one, 0)), expected(one));
    }
  }
  PyObject* cells = item(spec, 2);
  for (Py_ssize_t i = 0; i < PyTuple_Size(cells); ++i) {
    PyObject* entry = item(cells, i);
    environment.cells.push_back({Py_NewRef(item(entry, 0)), expected(entry)});
  }
  PyObject* items = item(spec, 3);
  for (Py_ssize_t i = 0; i < PyTuple_Size(items); ++i) {
    PyObject* entry = item(items, i);
    environment.items.push_back({Py_NewRef(item(entry, 0)), expected(item(entry, 1))});
  }
  PyObject* sets = item(spec, 5);
  for (Py_ssize_t i = 0; i < PyTuple_Size(sets); ++i) {
    PyObject* entry = item(sets, i);
    environment.sets.push_back({Py_NewRef(item(entry, 0)), {}});
    PyObject* members = item(entry, 1);
    for (Py_ssize_t j = 0; j < PyTuple_Size(members); ++j) {
      environment.sets.back().members.push_back(expected(item(members, j)));
    }
  }
  PyObject* attributes = item(spec, 7);
  for (Py_ssize_t i = 0; i < PyTuple_Size(attributes); ++i) {
    PyObject* entry = item(attributes, i);
    environment.add_attributes(item(entry, 0), item(entry, 1));
  }
}

void describe_code(pygraph::Environment& environment, PyObject* spec) {
  // (types, functions, kinds, partials, classes_hold)
  auto type_at = [](PyObject* sequence, Py_ssize_t index) {
    PyObject* type = item(sequence, index);
    if (!PyType_Check(type)) {
      PyErr_SetString(PyExc_TypeError, "expected a class");
      throw PythonError();
    }
    return reinterpret_cast<PyTypeObject*>(type);
  };
  PyObject* types = item(spec, 0);
  for (Py_ssize_t i = 0; i < PyTuple_Size(types); ++i) {
    PyTypeObject* type = type_at(types, i);
    Py_INCREF(type);
    environment.types.push_back({type});
  }
  auto part = [](PyObject* object) { return object == Py_None ? nullptr : object; };
  PyObject* functions = item(spec, 1);
  for (Py_ssize_t i = 0; i < PyTuple_Size(functions); ++i) {
    PyObject* entry = item(functions, i);
    if (!PyFunction_Check(item(entry, 0))) {
      PyErr_SetString(PyExc_TypeError, "expected a function");
      throw PythonError();
    }
    environment.add_function(item(entry, 0), item(entry, 1), part(item(entry, 2)), part(item(entry, 3)));
  }
  PyObject* kinds = item(spec, 2);
  for (Py_ssize_t i = 0; i < PyTuple_Size(kinds); ++i) {
    PyObject* entry = item(kinds, i);
    environment.add_kind(item(entry, 0), type_at(entry, 1));
  }
  PyObject* partials = item(spec, 3);
  for (Py_ssize_t i = 0; i < PyTuple_Size(partials); ++i) {
    PyObject* entry = item(partials, i);
    environment.partials.push_back({Py_NewRef(item(entry, 0)), Py_NewRef(item(entry, 1))});
  }
  environment.classes_hold = Py_NewRef(item(spec, 4));
}

std::vector<int> to_small_ints(PyObject* sequence) {
  std::vector<int> values;
  for (int64_t value : to_ints(sequence)) values.push_back(static_cast<int>(value));
  return values;
}

Replay describe_replay(PlanState& plan, PyObject* spec) {
  Replay replay;
  hold(plan, spec);  // everything in it is borrowed
  auto tensor_at = [&](int64_t leaf) { return plan.leaves.at(leaf).slot; };
  for (int64_t leaf : to_ints(field(spec, "inputs"))) replay.inputs.push_back(tensor_at(leaf));
  PyObject* memory = field(spec, "memory");
  for (Py_ssize_t i = 0; i < PyTuple_Size(memory); ++i) {
    PyObject* example = item(memory, i);  // an empty tensor of the right dtype and device, then sizes and strides
    const at::Tensor& tensor = THPVariable_Unpack(item(example, 0));
    const bool known = tensor.is_cuda() || tensor.is_cpu();
    c10::Allocator* allocator = known ? tensor.storage().allocator() : nullptr;
    replay.fresh.push_back({to_ints(item(example, 1)), to_ints(item(example, 2)), tensor.options(), allocator});
  }
  PyObject* slots = field(spec, "slots");
  for (Py_ssize_t i = 0; i < PyTuple_Size(slots); ++i) {
    Slot slot;
    PyObject* cells = item(item(slots, i), 0);
    for (Py_ssize_t j = 0; j < PyTuple_Size(cells); ++j) {
      PyObject* cell = item(cells, j);
      slot.cells.emplace_back(reinterpret_cast<uint64_t*>(to_word(item(cell, 0))), to_word(item(cell, 1)));
    }
    slot.commits = to_small_ints(item(item(slots, i), 1));
    replay.slots.push_back(std::move(slot));
  }
  PyObject* numbers = field(spec, "numbers");
  for (Py_ssize_t i = 0; i < PyTuple_Size(numbers); ++i) {
    PyObject* entry = item(numbers, i);
    NumberSlot slot;
    const Leaf& leaf = plan.leaves.at(to_int(item(entry, 0)));
    slot.number = leaf.slot;
    slot.real = leaf.kind == Leaf::Float;
    PyObject* cells = item(entry, 1);
    for (Py_ssize_t j = 0; j < PyTuple_Size(cells); ++j) {
      PyObject* cell = item(cells, j);
      const char* dtype = PyUnicode_AsUTF8(item(cell, 1));
      if (dtype == nullptr) throw PythonError();
      slot.cells.emplace_back(reinterpret_cast<void*>(to_word(item(cell, 0))), dtype);
    }
    slot.commits = to_small_ints(item(entry, 2));
    replay.numbers.push_back(std::move(slot));
  }
  PyObject* commits = field(spec, "commits");
  for (Py_ssize_t i = 0; i < PyTuple_Size(commits); ++i) {
    PyObject* commit = item(commits, i);
    replay.commits.push_back({
        to_word(item(commit, 0)), to_word(item(commit, 1)), to_word(item(commit, 2)), to_word(item(commit, 3)),
        to_word(item(commit, 4)),
    });
  }
  replay.synced = reinterpret_cast<int64_t*>(to_word(field(spec, "synced")));
  PyObject* launch = field(spec, "launch");
  if (PyLong_Check(item(launch, 0))) {
    replay.launch = to_word(item(launch, 0));
    replay.executable = to_word(item(launch, 1));
  } else {
    replay.ready = item(launch, 0);
    replay.launcher = item(launch, 1);
  }
  for (int64_t leaf : to_ints(field(spec, "updated"))) replay.updated.push_back(tensor_at(leaf));
  replay.updated_captured = to_small_ints(field(spec, "updated_captured"));
  PyObject* outputs = field(spec, "outputs");
  for (Py_ssize_t i = 0; i < PyTuple_Size(outputs); ++i) {
    PyObject* entry = item(outputs, i);  // (memory, None) or (memory, (sizes, strides, offset))
    Output output{static_cast<int>(to_int(item(entry, 0))), item(entry, 1) == Py_None, {}, {}, 0};
    if (!output.whole) {
      output.sizes = to_ints(item(item(entry, 1), 0));
      output.strides = to_ints(item(item(entry, 1), 1));
      output.offset = to_int(item(item(entry, 1), 2));
    }
    replay.outputs.push_back(std::move(output));
  }
  PyObject* results = field(spec, "results");
  for (Py_ssize_t i = 0; i < PyTuple_Size(results); ++i) {
    PyObject* entry = item(results, i);
    std::string kind = PyUnicode_AsUTF8(checked(item(entry, 0)));
    ResultLeaf leaf{ResultLeaf::Static};
    if (kind == "static") {
      leaf.value = item(entry, 1);
    } else {
      leaf.kind = kind == "output" ? ResultLeaf::FromOutput
          : kind == "argument"     ? ResultLeaf::Argument
                                   : ResultLeaf::Repeat;
      leaf.index = static_cast<int>(to_int(item(entry, 1)));
    }
    replay.results.push_back(leaf);
  }
  PyObject* unflatten = field(spec, "unflatten");
  if (unflatten == Py_None) describe_shape(replay.shape, field(spec, "example"), [](PyObject*) {});
  else replay.unflatten = unflatten;
  return replay;
}

void make_plan(PlanState& plan, PyObject* args, PyObject* kwargs, PyObject* spec) {
  plan.keep = checked(PyList_New(0));
  Call call;
  PyObject* live = field(spec, "live");
  auto add = [&](PyObject* leaf) { describe_leaf(plan, leaf, live, call); };
  describe_shape(plan.nodes, args, add);
  describe_shape(plan.nodes, kwargs, add);
  for (const Node& node : plan.nodes) {
    for (PyObject* key : node.keys) hold(plan, key);
  }
  PyObject* leaves = field(spec, "leaves");
  bool agree = PyList_GET_SIZE(leaves) == static_cast<Py_ssize_t>(call.leaves.size());
  for (size_t i = 0; agree && i < call.leaves.size(); ++i) agree = PyList_GET_ITEM(leaves, i) == call.leaves[i];
  if (!agree || under_mode() || overlaps_unseen(plan, call)) {
    PyErr_SetString(PyExc_ValueError, "this kind of call cannot be planned");
    throw PythonError();
  }
  compare_sharing(plan, call, [&](size_t i, int first, int same, int64_t distance) {
    plan.tensors[i].first = first;
    plan.tensors[i].same = same;
    plan.tensors[i].distance = distance;
    return true;
  });
  plan.settings = current_settings();
  plan.cpu_autocast = autocast_dtype(at::kCPU);
  PyObject* device = field(spec, "device");
  if (device != Py_None) {
    const char* name = PyUnicode_AsUTF8(device);
    if (name == nullptr) throw PythonError();
    plan.accelerator = c10::Device(name).type();
    plan.accelerator_autocast = autocast_dtype(*plan.accelerator);
  }
  plan.released = to_small_ints(field(spec, "released"));
  for (int index : plan.released) {
    PyObject* first = item(args, 0);
    if (!PyList_CheckExact(first) || PyList_GetItem(first, index) != call.leaves.at(index)) {
      PyErr_Format(PyExc_ValueError, "item %d of the first argument is not leaf %d", index, index);
      throw PythonError();
    }
  }
  PyObject* captured = field(spec, "captured");
  for (Py_ssize_t i = 0; i < PyTuple_Size(captured); ++i) {
    PyObject* object = item(item(captured, i), 0);
    PyObject* address = item(item(captured, i), 1);  // None if nothing reads it by address
    hold(plan, object);
    const c10::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
    bool grad = tensor->requires_grad();
    bool placed = address != Py_None && tensor->numel() != 0;
    plan.captured.push_back({object, tensor, placed ? to_word(address) : 0, placed, Layout(*tensor), grad});
  }
  PyObject* owned = field(spec, "owned");
  for (Py_ssize_t i = 0; i < PyTuple_Size(owned); ++i) {
    plan.owned.emplace_back(to_word(item(item(owned, i), 0)), to_word(item(item(owned, i), 1)));
  }
  describe_environment(plan, field(spec, "environment"));
  describe_code(plan.environment, item(field(spec, "environment"), 6));
  plan.run = field(spec, "run");
  hold(plan, plan.run);
  PyObject* replay = field(spec, "replay");
  plan.as_it_is = field(spec, "as_it_is") == Py_True;
  plan.way = field(spec, "alone") == Py_True ? Way::Executable : Way::Function;
  PyObject* stream = field(spec, "stream");
  if (stream != Py_None) {
    hold(plan, stream);  // everything in it is borrowed
    plan.stream = LastStream{
        reinterpret_cast<int64_t*>(to_word(field(stream, "last_stream"))), to_word(field(stream, "is_capturing")),
        field(stream, "current_stream"), field(stream, "device_index"),
    };
  }
  if (plan.accelerator && *plan.accelerator != at::kCPU) {
    plan.device_index = c10::impl::VirtualGuardImpl(*plan.accelerator).getDevice().index();
  }
  if (replay != Py_None) {
    plan.replay = describe_replay(plan, replay);
    plan.way = Way::Replay;
    plan.device_index = static_cast<int>(to_int(plan.stream->device_index));
  }
  plan.environment.arm();
}

PyObject* plan_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *args, *kwargs, *spec;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyTuple_Type, &args, &PyDict_Type, &kwargs, &PyDict_Type, &spec)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<PlanObject*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->state = new PlanState();
  PyObject* made = guarded([&] {
    make_plan(*self->state, args, kwargs, spec);
    return reinterpret_cast<PyObject*>(self);
  });
  if (made == nullptr) Py_DECREF(self);
  return made;
}

int plan_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<PlanObject*>(object);
  Py_VISIT(Py_TYPE(object));
  if (self->state == nullptr) return 0;
  Py_VISIT(self->state->keep);
  return self->state->environment.traverse(visit, arg);
}

int plan_clear(PyObject* object) {
  auto* self = reinterpret_cast<PlanObject*>(object);
  if (self->state != nullptr) {
    self->state->dead = true;
    self->state->environment.clear();
    Py_CLEAR(self->state->keep);
  }
  return 0;
}

void plan_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  plan_clear(object);
  delete reinterpret_cast<PlanObject*>(object)->state;
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* plan_hits(PyObject* object, void*) {
  return PyLong_FromLongLong(reinterpret_cast<PlanObject*>(object)->state->hits);
}

PyObject* plan_stamp(PyObject* object, void*) {
  return PyLong_FromLongLong(reinterpret_cast<PlanObject*>(object)->state->stamp);
}

PyObject* plan_patches(PyObject* object, void*) {
  return PyLong_FromLongLong(reinterpret_cast<PlanObject*>(object)->state->patches);
}

PyObject* plan_way(PyObject* object, void*) {
  switch (reinterpret_cast<PlanObject*>(object)->state->way) {
    case Way::Replay: return PyUnicode_FromString("replay");
    case Way::Executable: return PyUnicode_FromString("executable");
    default: return PyUnicode_FromString("function");
  }
}

// ---- the dispatcher ------------------------------------------------------------------------------------------------

PyObject* dispatcher_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *acquire, *release, *here;
  if (!PyArg_ParseTuple(arguments, "OOO", &acquire, &release, &here)) return nullptr;
  auto* self = reinterpret_cast<DispatcherObject*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->acquire = Py_NewRef(acquire);
  self->release = Py_NewRef(release);
  self->here = Py_NewRef(here);
  self->plans = new std::vector<PlanObject*>();
  self->profile = new std::array<double, 5>();
  self->profile->fill(0);
  self->clock = 0;
  self->profiling = false;
  return reinterpret_cast<PyObject*>(self);
}

void drop_plans(DispatcherObject* self) {
  std::vector<PlanObject*> plans;
  plans.swap(*self->plans);
  for (PlanObject* plan : plans) {
    plan->state->dead = true;
    Py_DECREF(plan);
  }
}

int dispatcher_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->acquire);
  Py_VISIT(self->release);
  Py_VISIT(self->here);
  if (self->plans != nullptr) {
    for (PlanObject* plan : *self->plans) Py_VISIT(reinterpret_cast<PyObject*>(plan));
  }
  return 0;
}

int dispatcher_clear(PyObject* object) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  if (self->plans != nullptr) drop_plans(self);
  Py_CLEAR(self->acquire);
  Py_CLEAR(self->release);
  Py_CLEAR(self->here);
  return 0;
}

void dispatcher_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  dispatcher_clear(object);
  delete self->plans;
  delete self->profile;
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* dispatcher_add(PyObject* object, PyObject* plan) {
  if (Py_TYPE(plan) != plan_type) {
    PyErr_SetString(PyExc_TypeError, "expected a Plan");
    return nullptr;
  }
  auto& plans = *reinterpret_cast<DispatcherObject*>(object)->plans;
  plans.insert(plans.begin(), reinterpret_cast<PlanObject*>(Py_NewRef(plan)));
  Py_RETURN_NONE;
}

PyObject* dispatcher_remove(PyObject* object, PyObject* plan) {
  auto& plans = *reinterpret_cast<DispatcherObject*>(object)->plans;
  auto found = std::find(plans.begin(), plans.end(), reinterpret_cast<PlanObject*>(plan));
  if (found != plans.end()) {
    plans.erase(found);
    reinterpret_cast<PlanObject*>(plan)->state->dead = true;
    Py_DECREF(plan);
  }
  Py_RETURN_NONE;
}

PyObject* dispatcher_drop_all(PyObject* object, PyObject*) {
  drop_plans(reinterpret_cast<DispatcherObject*>(object));
  Py_RETURN_NONE;
}

PyObject* dispatcher_tick(PyObject* object, PyObject*) {
  return PyLong_FromLongLong(++reinterpret_cast<DispatcherObject*>(object)->clock);
}

PyObject* dispatcher_profile(PyObject* object, PyObject* on) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  auto& parts = *self->profile;
  PyObject* result = Py_BuildValue("(ddddd)", parts[0], parts[1], parts[2], parts[3], parts[4]);
  parts.fill(0);
  self->profiling = on == Py_True;
  return result;
}

PyGetSetDef plan_fields[] = {
    {"hits", plan_hits, nullptr, "How many calls it ran.", nullptr},
    {"stamp", plan_stamp, nullptr, "When it ran last, by the dispatcher's clock.", nullptr},
    {"patches", plan_patches, nullptr, "How many nodes it sent.", nullptr},
    {"way", plan_way, nullptr, "What it does: 'replay', 'executable' or 'function'.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot plan_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plan_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(plan_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(plan_clear)},
    {Py_tp_getset, plan_fields},
    {0, nullptr},
};

PyType_Spec plan_spec = {
    "pygraph_native.Plan", sizeof(PlanObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, plan_slots,
};

PyMethodDef dispatcher_methods[] = {
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatcher_dispatch)), METH_FASTCALL,
     "The result of a call, or MISS."},
    {"match", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatcher_match)), METH_FASTCALL,
     "The plan that a call matches, or None; nothing is run."},
    {"add", dispatcher_add, METH_O, "Try this plan before the others."},
    {"remove", dispatcher_remove, METH_O, "Forget a plan; nothing if it is not here."},
    {"clear", dispatcher_drop_all, METH_NOARGS, "Forget all plans."},
    {"tick", dispatcher_tick, METH_NOARGS, "Advance the clock that stamps plans, and read it."},
    {"profile", dispatcher_profile, METH_O,
     "Nanoseconds spent in guards, turn, allocation, patches and launches since the last time; True starts counting."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot dispatcher_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(dispatcher_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dispatcher_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(dispatcher_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(dispatcher_clear)},
    {Py_tp_methods, dispatcher_methods},
    {0, nullptr},
};

PyType_Spec dispatcher_spec = {
    "pygraph_native.Dispatcher", sizeof(DispatcherObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, dispatcher_slots,
};

PyMethodDef functions[] = {
    {"referrers_of", pygraph::referrers_of, METH_VARARGS, "What refers to one of the arguments."},
    {"classes_of_objects", pygraph::classes_of_objects, METH_NOARGS, "The classes of all that the collector knows."},
    {"objects_of", pygraph::objects_of, METH_VARARGS, "All objects of these classes that the collector knows."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "pygraph_native", "The call path in C++; see pygraph.native.", -1,
    functions, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_pygraph_native() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  pygraph::prepare_guards();
  inside_name = PyUnicode_InternFromString("inside");
  PyObject* plan = PyType_FromSpec(&plan_spec);
  PyObject* dispatcher = PyType_FromSpec(&dispatcher_spec);
  miss = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  if (inside_name == nullptr || plan == nullptr || dispatcher == nullptr || miss == nullptr) return nullptr;
  plan_type = reinterpret_cast<PyTypeObject*>(plan);
  if (PyModule_AddObjectRef(module, "Plan", plan) < 0 || PyModule_AddObjectRef(module, "Dispatcher", dispatcher) < 0 ||
      PyModule_AddObjectRef(module, "MISS", miss) < 0) {
    return nullptr;
  }
  return module;
}
