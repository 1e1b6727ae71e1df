#include "rpc/auth.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "base/logging.h"
#include "base/strings.h"
#include "rpc/credential_file.h"

namespace saccade {
namespace {

constexpr std::string_view kHealth = "/grpc.health.v1.Health/";
// Any version of it.
constexpr std::string_view kReflection = "/grpc.reflection.";
constexpr std::string_view kScheme = "Bearer ";
constexpr size_t kMaxNameBytes = 63;
constexpr double kLogLinesPerS = 1;

std::optional<uint8_t> HexDigit(char c) {
  if (c >= '0' && c <= '9') return static_cast<uint8_t>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<uint8_t>(c - 'a' + 10);
  if (c >= 'A' && c <= 'F') return static_cast<uint8_t>(c - 'A' + 10);
  return std::nullopt;
}

bool ReadDigest(std::string_view hex, std::array<uint8_t, 32>& digest) {
  if (hex.size() != 2 * digest.size()) return false;
  for (size_t i = 0; i < digest.size(); ++i) {
    const std::optional<uint8_t> high = HexDigit(hex[2 * i]);
    const std::optional<uint8_t> low = HexDigit(hex[2 * i + 1]);
    if (!high || !low) return false;
    digest[i] = static_cast<uint8_t>(*high << 4 | *low);
  }
  return true;
}

bool IsName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' ||
                  c == '-';
         });
}

// The fault of one line, or empty.
std::string_view ReadLine(std::string_view line, TokenEntry& entry) {
  const size_t first = line.find(':');
  if (first == std::string_view::npos) return "expected role:sha256-hex[:name]";
  const std::string_view role = line.substr(0, first);
  if (role != "infer" && role != "admin") return "the role must be infer or admin";
  entry.role = role == "admin" ? Role::kAdmin : Role::kInfer;
  std::string_view rest = line.substr(first + 1);
  const size_t second = rest.find(':');
  if (second != std::string_view::npos) {
    const std::string_view name = rest.substr(second + 1);
    if (!IsName(name)) return "the name may have 1..63 letters, digits and _ . -";
    entry.name = std::string(name);
    rest = rest.substr(0, second);
  }
  if (!ReadDigest(rest, entry.digest))
    return "the SHA-256 of the token must be 64 hexadecimal digits";
  return "";
}

absl::Status Refuse(absl::StatusCode code, Reason reason, std::string_view message,
                    std::optional<Micros> retry_after = std::nullopt) {
  ErrorInfo info;
  info.reason = reason;
  info.retry_after = retry_after;
  return MakeError(code, message, info);
}

absl::Status Unauthenticated(std::string_view message) {
  return Refuse(absl::StatusCode::kUnauthenticated, Reason::kUnauthenticated, message);
}

}  // namespace

Access AccessOf(std::string_view method) {
  if (method.starts_with(kHealth)) return Access::kOpen;
  if (ChecksItself(method) || method.starts_with(kReflection)) return Access::kInfer;
  return Access::kAdmin;
}

bool ChecksItself(std::string_view method) {
  return std::find(method::kCheckedByHandler.begin(), method::kCheckedByHandler.end(), method) !=
         method::kCheckedByHandler.end();
}

absl::StatusOr<std::vector<TokenEntry>> ParseTokens(std::string_view text,
                                                    std::string_view file_name) {
  std::vector<TokenEntry> tokens;
  int number = 0;
  const auto refuse = [&](std::string_view why) {
    return absl::InvalidArgumentError(StrCat(file_name, ":", number, ": ", why));
  };
  if (text.size() > kMaxTokensBytes) return refuse(StrCat("more than ", kMaxTokensBytes, " bytes"));
  while (!text.empty()) {
    ++number;
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    line = FromAbsl(absl::StripAsciiWhitespace(ToAbsl(line)));
    if (line.empty() || line.front() == '#') continue;
    TokenEntry entry;
    if (const std::string_view fault = ReadLine(line, entry); !fault.empty()) return refuse(fault);
    if (tokens.size() == kMaxTokens) return refuse(StrCat("more than ", kMaxTokens, " tokens"));
    if (std::any_of(tokens.begin(), tokens.end(),
                    [&](const TokenEntry& other) { return other.digest == entry.digest; })) {
      return refuse("the same token is listed before");
    }
    tokens.push_back(std::move(entry));
  }
  if (tokens.empty()) return refuse("holds no token");
  return tokens;
}

absl::StatusOr<std::unique_ptr<Authenticator>> Authenticator::Load(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadCredentialFile("server.tokens_file", path,
                                                              Secrecy::kSecret, kMaxTokensBytes));
  absl::StatusOr<std::vector<TokenEntry>> tokens = ParseTokens(text, path);
  if (!tokens.ok()) {
    return absl::InvalidArgumentError(
        StrCat("server.tokens_file: ", FromAbsl(tokens.status().message())));
  }
  return std::make_unique<Authenticator>(*std::move(tokens));
}

Authenticator::Authenticator(std::vector<TokenEntry> tokens)
    : tokens_(std::move(tokens)), log_bucket_(kLogLinesPerS, TimePoint{}) {}

absl::Status Authenticator::Check(std::string_view method,
                                  std::span<const std::string_view> authorization,
                                  const std::string& address, TimePoint now) {
  const Access access = AccessOf(method);
  if (access == Access::kOpen) return absl::OkStatus();
  // These guess nothing, so they cost the address nothing.
  if (authorization.empty()) {
    return Unauthenticated("the call has no token; send the header authorization: Bearer TOKEN");
  }
  const std::string_view value = authorization.front();
  if (authorization.size() > 1 || !absl::StartsWithIgnoreCase(ToAbsl(value), ToAbsl(kScheme)) ||
      value.size() == kScheme.size() || value.size() > kScheme.size() + kMaxTokenBytes) {
    return Unauthenticated("the header authorization must be given once, as Bearer TOKEN");
  }
  const auto limited = [](Micros wait) {
    return Refuse(absl::StatusCode::kResourceExhausted, Reason::kRateLimited,
                  "too many calls with an unknown token came from this address", wait);
  };
  // Before the token is looked at: otherwise guessing would go on undisturbed.
  if (const std::optional<Micros> wait = failures_.WaitFor(address, now)) return limited(*wait);
  const TokenEntry* token = Find(value.substr(kScheme.size()));
  if (token == nullptr) {
    // Calls at the same time may all have passed above.
    if (const std::optional<Micros> wait = failures_.Take(address, now)) return limited(*wait);
    if (failures_.WaitFor(address, now) && MayLog(now))
      LogWarn("too many unknown tokens from one address", {{"peer", address}});
    return Unauthenticated("the token is not known");
  }
  if (access == Access::kAdmin && token->role != Role::kAdmin) {
    if (MayLog(now)) LogWarn("an admin call without that role", {{"token_name", token->name}});
    return Refuse(absl::StatusCode::kPermissionDenied, Reason::kPermissionDenied,
                  "this call needs a token of the role admin");
  }
  return absl::OkStatus();
}

const TokenEntry* Authenticator::Find(std::string_view token) const {
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  // Every entry, every byte: the time tells nothing.
  const TokenEntry* found = nullptr;
  for (const TokenEntry& entry : tokens_) {
    if (CRYPTO_memcmp(entry.digest.data(), digest.data(), digest.size()) == 0) found = &entry;
  }
  return found;
}

bool Authenticator::MayLog(TimePoint now) {
  const std::lock_guard lock(log_mu_);
  return !log_bucket_.Take(now);
}

}  // namespace saccade
