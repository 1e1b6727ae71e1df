// The first line is a method, the second a peer as gRPC names it, every other one a value of the
// header authorization: let in exactly when it is a known token of a role that may.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "rpc/auth.h"
#include "rpc/peer.h"

namespace {

// Of the tokens "infer" and "admin".
constexpr std::string_view kTokens =
    "infer:92bc2e412115876270c842f18eede00e752babbb9bf6f402ee8c5ab3b6746af2:i\n"
    "admin:8c6976e5b5410415bde908bd4dee15dfb167a9c873fc4bb8a81f6f2ab448a918:a\n";

bool Bears(std::string_view value, std::string_view token) {
  constexpr std::string_view kScheme = "bearer ";
  if (value.size() != kScheme.size() + token.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = value[i];
    if ((c >= 'A' && c <= 'Z' ? c + 32 : c) != kScheme[i]) return false;
  }
  return value.substr(kScheme.size()) == token;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::string_view> lines;
  for (std::string_view left(reinterpret_cast<const char*>(data), size); lines.size() < 8;) {
    const size_t end = left.find('\n');
    lines.push_back(left.substr(0, end));
    if (end == std::string_view::npos) break;
    left.remove_prefix(end + 1);
  }
  lines.resize(std::max<size_t>(lines.size(), 2));
  const std::string_view method = lines[0];
  const std::string address = saccade::PeerAddress(lines[1]);
  // An IPv6 network is no peer; every other address stands for itself.
  if (!address.ends_with("/64") && !address.starts_with("ipv") &&
      saccade::PeerAddress(address) != address) {
    std::abort();
  }
  saccade::IsOnThisHost(lines[1]);

  const std::vector<std::string_view> values(lines.begin() + 2, lines.end());
  saccade::Authenticator authenticator(saccade::ParseTokens(kTokens, "f").value());
  const bool infer = values.size() == 1 && Bears(values[0], "infer");
  const bool admin = values.size() == 1 && Bears(values[0], "admin");
  bool allowed = true;
  switch (saccade::AccessOf(method)) {
    case saccade::Access::kOpen:
      break;
    case saccade::Access::kInfer:
      allowed = infer || admin;
      break;
    case saccade::Access::kAdmin:
      allowed = admin;
      break;
  }
  const absl::Status status =
      authenticator.Check(method, values, address, saccade::TimePoint(saccade::Micros(1)));
  if (status.ok() != allowed) std::abort();
  if (!status.ok() && saccade::GetErrorInfo(status).reason == saccade::Reason::kUnspecified) {
    std::abort();
  }
  return 0;
}
