#pragma once
// Authenticator: who may call what. Bearer tokens with roles, kept as SHA-256 digests. Deny by
// default: a method that is not listed in auth.cc needs the role admin.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "rpc/peer.h"
#include "session/token_bucket.h"

namespace saccade {

// What a call needs. kInfer is reached by every role; kAdmin without tokens by callers on this host
// only.
enum class Access : uint8_t { kOpen, kInfer, kAdmin };

// The methods whose handlers ask Front::Authorize themselves, so that their refusals are typed.
// A call of any other method is cut off by the guard in server.cc before its handler matters.
namespace method {
inline constexpr std::string_view kSession = "/saccade.v1.Inference/Session";
inline constexpr std::string_view kPredict = "/saccade.v1.Inference/Predict";
inline constexpr std::string_view kGenerate = "/saccade.v1.Inference/Generate";
inline constexpr std::string_view kListModels = "/saccade.v1.Models/List";
inline constexpr std::string_view kGetModel = "/saccade.v1.Models/Get";
inline constexpr std::string_view kGetStatus = "/saccade.v1.Server/GetStatus";
inline constexpr std::string_view kGetRecent = "/saccade.v1.Admin/GetRecent";
inline constexpr std::string_view kGetTrace = "/saccade.v1.Admin/GetTrace";
inline constexpr std::string_view kGetCache = "/saccade.v1.Admin/GetCache";
inline constexpr std::string_view kLoadModel = "/saccade.v1.Admin/LoadModel";
inline constexpr std::string_view kUnloadModel = "/saccade.v1.Admin/UnloadModel";
inline constexpr std::string_view kReloadModel = "/saccade.v1.Admin/ReloadModel";
inline constexpr std::string_view kGetLimits = "/saccade.v1.Admin/GetLimits";
inline constexpr std::string_view kSetLimits = "/saccade.v1.Admin/SetLimits";
inline constexpr std::string_view kGetMemory = "/saccade.v1.Admin/GetMemory";
inline constexpr std::string_view kDrain = "/saccade.v1.Admin/Drain";
inline constexpr std::array kCheckedByHandler = {kSession,   kPredict,   kGenerate,    kListModels,
                                                 kGetModel,  kGetStatus, kGetRecent,   kGetTrace,
                                                 kGetCache,  kLoadModel, kUnloadModel, kReloadModel,
                                                 kGetLimits, kSetLimits, kGetMemory,   kDrain};
}  // namespace method

Access AccessOf(std::string_view method);
bool ChecksItself(std::string_view method);

enum class Role : uint8_t { kInfer, kAdmin };

struct TokenEntry {
  Role role = Role::kInfer;
  std::array<uint8_t, 32> digest{};  // SHA-256 of the token's bytes
  std::string name;                  // for the log; may be empty
};

inline constexpr size_t kMaxTokensBytes = 262'144;
inline constexpr size_t kMaxTokens = 1'024;
inline constexpr size_t kMaxTokenBytes = 512;

// Lines "role:sha256-hex[:name]"; empty lines and those that start with # are skipped.
// INVALID_ARGUMENT "file_name:line: ..." on the first fault, never showing a line's content: a
// token that was pasted by mistake must not reach a log.
absl::StatusOr<std::vector<TokenEntry>> ParseTokens(std::string_view text,
                                                    std::string_view file_name);

// Any thread.
class Authenticator {
 public:
  // A failed attempt with an unknown token takes one of these; without any left every attempt from
  // that address is refused unseen.
  static constexpr double kFailuresBurst = 20;
  static constexpr double kFailuresPerS = 1;

  // Reads `server.tokens_file`. INVALID_ARGUMENT names the key, the file and the line.
  static absl::StatusOr<std::unique_ptr<Authenticator>> Load(const std::string& path);
  explicit Authenticator(std::vector<TokenEntry> tokens);

  // OK, or an error with its reason: UNAUTHENTICATED (kUnauthenticated), PERMISSION_DENIED
  // (kPermissionDenied), RESOURCE_EXHAUSTED (kRateLimited, retry_after) for an address with too
  // many failures. `authorization` are the values of that header, `address` is PeerAddress.
  absl::Status Check(std::string_view method, std::span<const std::string_view> authorization,
                     const std::string& address, TimePoint now);

 private:
  const TokenEntry* Find(std::string_view token) const;
  // Few lines, whatever clients do.
  bool MayLog(TimePoint now);

  const std::vector<TokenEntry> tokens_;
  PeerBuckets failures_{kFailuresPerS, kFailuresBurst};
  std::mutex log_mu_;
  TokenBucket log_bucket_;
};

}  // namespace saccade
