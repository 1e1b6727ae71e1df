#pragma once
// Abseil may be built with its own string_view (Debian 12) or with the standard one (Ubuntu 24.04
// and newer). These let code that holds std::string_view call Abseil with both. Inside namespace
// saccade write StrCat(...), not absl::StrCat.
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace saccade {

inline absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }
inline std::string_view FromAbsl(absl::string_view text) { return {text.data(), text.size()}; }

namespace strings_internal {
template <class T>
decltype(auto) Argument(const T& value) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return ToAbsl(value);
  } else {
    return (value);
  }
}
}  // namespace strings_internal

// absl::StrCat and absl::StrAppend that also take std::string_view.
template <class... Args>
std::string StrCat(const Args&... args) {
  return absl::StrCat(strings_internal::Argument(args)...);
}
template <class... Args>
void StrAppend(std::string* out, const Args&... args) {
  absl::StrAppend(out, strings_internal::Argument(args)...);
}

}  // namespace saccade
