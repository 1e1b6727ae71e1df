#pragma once
// Reads NumPy's .npz files of the tests' own data: a zip of .npy arrays, stored or deflated.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"

namespace saccade {

struct NpyArray {
  std::string dtype;  // as NumPy writes it: "|u1", "<i4", "<f4"
  std::vector<int64_t> dims;
  std::string bytes;  // C order
  template <class T>
  const T* As() const {
    return reinterpret_cast<const T*>(bytes.data());
  }
};

// By name, without ".npy".
absl::StatusOr<std::map<std::string, NpyArray>> ReadNpz(const std::string& path);

}  // namespace saccade
