"""Kernels of our own that run inside captured graphs, compiled by NVRTC in a hundredth of a second."""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.runtime.cuda.api import check, cu

CAPACITIES = (8, 64, 480)
"""How many addresses one node takes; kernels have 4 KB of parameters everywhere."""

CHUNK = 1 << 15
"""Bytes that one block copies."""

_SOURCE = """
extern "C" __device__ __cudart_builtin__ cudaError_t CUDARTAPI cudaGraphKernelNodeSetParam(
    cudaGraphDeviceNode_t node, size_t offset, const void* value, size_t size);

extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);

typedef unsigned long long u64;
struct Target { u64 node, offset, value; };            // node 0: offset is an address in the table
struct Segment { u64 fixed, nbytes, value, chunk; };   // chunk: the first block that copies it

template <int N> struct Words { u64 word[N]; };

template <int N> __device__ void update(const Words<N>& words, const Target* targets, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    Target target = targets[i];
    u64 word = words.word[target.value];  // for the address of a parameter each thread would copy all of them first
    if (target.node)
      cudaGraphKernelNodeSetParam((cudaGraphDeviceNode_t)target.node, target.offset, &word, sizeof(word));
    else
      *(u64*)target.offset = word;
  }
}

template <int N> __device__ void copy(const Words<N>& words, const Segment* segments, int count, int out) {
  int low = 0, high = count - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (segments[middle].chunk <= blockIdx.x) low = middle; else high = middle - 1;
  }
  Segment segment = segments[low];
  u64 start = (blockIdx.x - segment.chunk) * (u64)CHUNK;
  u64 size = segment.nbytes - start < CHUNK ? segment.nbytes - start : CHUNK;
  char* target = (char*)(out ? words.word[segment.value] : segment.fixed) + start;
  const char* source = (const char*)(out ? segment.fixed : words.word[segment.value]) + start;
  if ((((u64)target ^ (u64)source) & 15) == 0) {  // both reach a 16-byte boundary together
    u64 head = (16 - ((u64)target & 15)) & 15;
    if (head > size) head = size;
    if (threadIdx.x < head) target[threadIdx.x] = source[threadIdx.x];
    u64 wide = (size - head) / 16;
    int4* wide_target = (int4*)(target + head);
    const int4* wide_source = (const int4*)(source + head);
    u64 i = threadIdx.x;
    for (; i + 3 * blockDim.x < wide; i += 4 * blockDim.x) {
      int4 a = wide_source[i], b = wide_source[i + blockDim.x];
      int4 c = wide_source[i + 2 * blockDim.x], d = wide_source[i + 3 * blockDim.x];
      wide_target[i] = a; wide_target[i + blockDim.x] = b;
      wide_target[i + 2 * blockDim.x] = c; wide_target[i + 3 * blockDim.x] = d;
    }
    for (; i < wide; i += blockDim.x) wide_target[i] = wide_source[i];
    for (u64 j = head + wide * 16 + threadIdx.x; j < size; j += blockDim.x) target[j] = source[j];
  } else {
    for (u64 j = threadIdx.x; j < size; j += blockDim.x) target[j] = source[j];
  }
}

#define KERNELS(N) \\
  extern "C" __global__ void pygraph_update_##N(Words<N> words, const Target* targets, int count) { \\
    update<N>(words, targets, count); } \\
  extern "C" __global__ void pygraph_copy_in_##N(Words<N> words, const Segment* segments, int count) { \\
    copy<N>(words, segments, count, 0); } \\
  extern "C" __global__ void pygraph_copy_out_##N(Words<N> words, const Segment* segments, int count) { \\
    copy<N>(words, segments, count, 1); }

// Tells a conditional node whether its predicate is true.
extern "C" __global__ void pygraph_set_condition(u64 handle, const unsigned char* predicate) {
  if (threadIdx.x == 0) cudaGraphSetConditional((cudaGraphConditionalHandle)handle, *predicate != 0);
}

// One node's copy of up to three dimensions, in rows of width bytes.
extern "C" __global__ void pygraph_copy_3d(
    char* target, const char* source, u64 target_pitch, u64 target_rows, u64 source_pitch, u64 source_rows,
    u64 width, u64 height) {
  u64 row = blockIdx.x % height, layer = blockIdx.x / height;
  target += (layer * target_rows + row) * target_pitch;
  source += (layer * source_rows + row) * source_pitch;
  for (u64 i = threadIdx.x; i < width; i += blockDim.x) target[i] = source[i];
}

// One node's fill of rows of width elements.
extern "C" __global__ void pygraph_fill_2d(char* target, u64 pitch, unsigned value, unsigned size, u64 width) {
  target += blockIdx.x * pitch;
  for (u64 i = threadIdx.x; i < width; i += blockDim.x)
    if (size == 4) ((unsigned*)target)[i] = value;
    else if (size == 2) ((unsigned short*)target)[i] = value;
    else target[i] = value;
}

// The mask of a dropout with the random numbers of torch's own kernel (fused_dropout_kernel_vec): each thread draws for
// `wide` elements in a row, then for those as many elements on as all threads have. cuRAND's Philox: the key is the
// seed, the counter the offset in steps of four and the number of the thread.
__device__ uint4 philox(uint4 counter, unsigned key, unsigned other) {
  for (int round = 0; round < 10; round++) {
    unsigned high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
    unsigned high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key, low1, high0 ^ counter.w ^ other, low0);
    key += 0x9E3779B9u;
    other += 0xBB67AE85u;
  }
  return counter;
}

__device__ unsigned kept(unsigned random, float keep) {
  return fmaf((float)random, 2.3283064e-10f, 2.3283064e-10f / 2.0f) < keep;
}

extern "C" __global__ void pygraph_dropout_mask(
    unsigned char* mask, const long long* seed, const long long* offset, u64 intragraph, unsigned count, float keep,
    unsigned wide) {
  unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  u64 key = (u64)*seed, step = ((u64)*offset + intragraph) / 4;
  u64 stride = (u64)gridDim.x * blockDim.x * wide;
  for (u64 first = (u64)thread * wide; first < count; first += stride) {
    for (unsigned i = 0; i < wide; i += 4, step++) {
      uint4 drawn = philox(make_uint4((unsigned)step, (unsigned)(step >> 32), thread, 0), (unsigned)key,
                           (unsigned)(key >> 32));
      *(unsigned*)(mask + first + i) = kept(drawn.x, keep) | kept(drawn.y, keep) << 8 | kept(drawn.z, keep) << 16 |
                                       kept(drawn.w, keep) << 24;
    }
  }
}
"""


_lock = threading.RLock()


def _module(arch: str) -> Any:
    """The compiled module for an architecture, as ``sm_90``."""
    with _lock:  # cuda.core finds parts of itself missing where two threads import it first
        return _compiled(arch)


@functools.cache
def _compiled(arch: str) -> Any:
    core: Any = importlib.import_module("cuda.core")  # slow to import
    source = f"#define CHUNK {CHUNK}\n{_SOURCE}\n" + "\n".join(f"KERNELS({n})" for n in CAPACITIES)
    return core.Program(source, "c++", core.ProgramOptions(std="c++17", arch=arch)).compile("cubin")


@functools.cache
def _kernel(name: str, device: torch.device) -> Any:
    """One of our kernels; the cache keeps it loaded."""
    major, minor = torch.cuda.get_device_capability(device)
    return _module(f"sm_{major}{minor}").get_kernel(name)


THREADS = 256
"""Threads of a block of our kernels."""


def launch_params(name: str, blocks: int, arguments: Sequence[Any], device: torch.device) -> tuple[Any, object]:
    """The parameters of a node that launches one of our kernels, and the objects that must live until it is added.

    Args:
        name: The kernel.
        blocks: How many blocks of `THREADS` threads.
        arguments: Its arguments as ctypes objects.
        device: Where it runs.
    """
    array = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.kern = cu.CUkernel(int(_kernel(name, device).handle))
    params.ctx = check(cu.cuCtxGetCurrent())
    params.gridDimX, params.gridDimY, params.gridDimZ = blocks, 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = THREADS, 1, 1
    params.kernelParams = ctypes.addressof(array)
    return params, (array, arguments)
