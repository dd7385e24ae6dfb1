// torch's settings that choose kernels or change results, as numbers to compare with those of the planned call.
//
// `pygraph.guards.torch_settings` reads them for calls that take the path in Python.
#pragma once

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <array>
#include <cstdint>
#include <optional>

// ATen/autocast_mode.h would include all of ATen. Checked with torch 2.11 and 2.13.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace pygraph {
namespace {

// The values of `pygraph.guards.torch_settings.mode_key`, without autocast, which depends on the device of a plan.
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

// Whether a mode intercepts every operation, so that operations are not those of the planned call.
bool is_under_mode() {
  return at::impl::PythonTorchFunctionTLS::stack_len() != 0 || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

int64_t autocast_dtype(at::DeviceType type) {
  return at::autocast::is_autocast_enabled(type) ? static_cast<int64_t>(at::autocast::get_autocast_dtype(type)) : -1;
}

// The settings of the planned call, with autocast and the current device of its accelerator.
struct SettingsGuard {
  Settings settings;
  int64_t cpu_autocast;
  std::optional<at::DeviceType> accelerator;
  int64_t accelerator_autocast;
  int device_index = -1;  // the device that must be current; -1 if any may be

  void set(std::optional<at::DeviceType> type) {
    settings = current_settings();
    cpu_autocast = autocast_dtype(at::kCPU);
    accelerator = type;
    if (!type) return;
    accelerator_autocast = autocast_dtype(*type);
    if (*type != at::kCPU) device_index = current_device();
  }

  bool holds(const Settings& now) const {
    return now == settings && autocast_dtype(at::kCPU) == cpu_autocast &&
        (!accelerator || autocast_dtype(*accelerator) == accelerator_autocast);
  }

  bool is_device_current() const { return device_index < 0 || current_device() == device_index; }

 private:
  int current_device() const { return c10::impl::VirtualGuardImpl(*accelerator).getDevice().index(); }
};

}  // namespace
}  // namespace pygraph
