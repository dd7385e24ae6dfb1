// Memory that tensors share: arguments among each other as in the planned call, and none with captured memory.
#pragma once

#include "arguments.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace pygraph {
namespace {

// How a tensor among the arguments shares memory with earlier ones.
struct Sharing {
  int first = -1;        // the first tensor with the same storage: itself if there is no other
  int same = -1;         // the first tensor that is the same object
  int64_t distance = 0;  // of its address from that of the first

  bool operator==(const Sharing&) const = default;
};

// Call `visit` with every tensor that has memory, and how it shares it; stop where that is false.
template <typename Visit>
bool visit_sharing(const ArgumentSpec& spec, const Call& call, Visit visit) {
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
    if (spec.tensors[i].empty) continue;
    int first = -1;
    if (count <= kLinear) {
      for (size_t j = 0; j < i; ++j) {
        if (!spec.tensors[j].empty && call.storages[j] == call.storages[i]) {
          first = static_cast<int>(j);
          break;
        }
      }
    } else {
      size_t row = (reinterpret_cast<uint64_t>(call.storages[i]) * 0x9E3779B97F4A7C15ull >> 32) & mask;
      while (table[row] >= 0 && call.storages[table[row]] != call.storages[i]) row = (row + 1) & mask;
      first = table[row];
      if (first < 0) table[row] = static_cast<int>(i);
    }
    Sharing sharing{static_cast<int>(i), static_cast<int>(i), 0};
    if (first >= 0) {
      sharing.first = first;
      sharing.distance = static_cast<int64_t>(call.addresses[i] - call.addresses[first]);
      for (size_t j = first; j < i; ++j) {
        if (call.tensors[j] == call.tensors[i]) {
          sharing.same = static_cast<int>(j);
          break;
        }
      }
    }
    if (!visit(i, sharing)) return false;
  }
  return true;
}

// Whether storages overlap that begin at different addresses, which `visit_sharing` does not see. Python serves those.
bool has_overlaps(const ArgumentSpec& spec, const Call& call) {
  c10::SmallVector<AddressRange, 40> ranges;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    if (!spec.tensors[i].empty) ranges.push_back(storage_range(*call.tensors[i]));
  }
  std::sort(ranges.begin(), ranges.end());
  AddressRange last{0, 0};
  for (const AddressRange& range : ranges) {
    if (range.first < last.second && range.first != last.first) return true;
    last = {range.first, std::max(last.second, range.second)};
  }
  return false;
}

struct SharingGuard {
  std::vector<Sharing> tensors;     // of the planned call
  std::vector<AddressRange> owned;  // memory of captured tensors that no argument may share, sorted and disjoint

  void describe(const ArgumentSpec& spec, const Call& call) {
    tensors.resize(call.tensors.size());
    visit_sharing(spec, call, [&](size_t i, const Sharing& sharing) {
      tensors[i] = sharing;
      return true;
    });
  }

  bool holds(const ArgumentSpec& spec, const Call& call) const {
    if (call.tensors.size() > 1) {
      bool same = visit_sharing(spec, call, [&](size_t i, const Sharing& sharing) { return tensors[i] == sharing; });
      if (!same || (call.foreign && has_overlaps(spec, call))) return false;
    }
    return owned.empty() || !shares_owned(spec, call);
  }

 private:
  // Whether an argument shares memory with a captured tensor while one of the two is written.
  bool shares_owned(const ArgumentSpec& spec, const Call& call) const {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      if (spec.tensors[i].empty) continue;
      auto [start, end] = storage_range(*call.tensors[i]);
      auto after = std::lower_bound(owned.begin(), owned.end(), AddressRange{end, 0});
      if (after != owned.begin() && std::prev(after)->second > start) return true;
    }
    return false;
  }
};

}  // namespace
}  // namespace pygraph
