#include "rpc/peer.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/strings.h"
#include "config/config.h"

namespace saccade {
namespace {

constexpr std::chrono::seconds kSweepInterval{1};
constexpr std::string_view kIpv4 = "ipv4:";
constexpr std::string_view kIpv6 = "ipv6:";

// The host of an IPv6 peer. gRPC writes a URI, in which the brackets and a zone's % may be escaped.
std::string_view Ipv6Host(std::string_view peer) {
  std::string_view host = peer.substr(kIpv6.size());
  for (const std::string_view open : {"[", "%5B", "%5b"}) {
    if (host.starts_with(open)) host.remove_prefix(open.size());
  }
  for (const std::string_view close : {"]", "%5D", "%5d"}) host = host.substr(0, host.find(close));
  return host;
}

std::string Ipv6Network(std::string_view host, std::string_view peer) {
  host = host.substr(0, host.find('%'));  // the zone of a link-local address
  in6_addr address{};
  if (::inet_pton(AF_INET6, std::string(host).c_str(), &address) != 1) return std::string(peer);
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    ::inet_ntop(AF_INET, &address.s6_addr[12], text.data(), text.size());
    return StrCat("ipv4:", text.data());
  }
  for (size_t i = 8; i < 16; ++i) address.s6_addr[i] = 0;
  ::inet_ntop(AF_INET6, &address, text.data(), text.size());
  return StrCat("ipv6:", text.data(), "/64");
}

}  // namespace

std::string PeerAddress(std::string_view peer) {
  if (peer.starts_with(kIpv4)) return std::string(peer.substr(0, peer.rfind(':')));
  if (!peer.starts_with(kIpv6)) return std::string(peer);
  return Ipv6Network(Ipv6Host(peer), peer);
}

bool IsOnThisHost(std::string_view peer) {
  if (peer.starts_with("unix:")) return true;
  // An IPv4 address in IPv6 is that address.
  const std::string address = PeerAddress(peer);
  if (address.starts_with(kIpv4)) return IsLoopback(StrCat(address.substr(kIpv4.size()), ":0"));
  return peer.starts_with(kIpv6) && IsLoopback(StrCat("[", Ipv6Host(peer), "]:0"));
}

std::optional<Micros> PeerBuckets::Take(const std::string& address, TimePoint now, double amount) {
  const std::lock_guard lock(mu_);
  return FindLocked(address, now, true)->Take(now, amount);
}

std::optional<Micros> PeerBuckets::WaitFor(const std::string& address, TimePoint now,
                                           double amount) {
  const std::lock_guard lock(mu_);
  TokenBucket* bucket = FindLocked(address, now, false);
  return bucket == nullptr ? std::nullopt : bucket->WaitFor(now, amount);
}

void PeerBuckets::SetRate(double per_second, TimePoint now) {
  const std::lock_guard lock(mu_);
  per_second_ = per_second;
  burst_ = std::max(1.0, per_second);
  for (auto& [peer, bucket] : buckets_) bucket.SetRate(per_second, now);
  if (others_) others_->SetRate(per_second, now);
}

size_t PeerBuckets::peers() const {
  const std::lock_guard lock(mu_);
  return buckets_.size();
}

TokenBucket* PeerBuckets::FindLocked(const std::string& address, TimePoint now, bool create) {
  const auto it = buckets_.find(address);
  if (it != buckets_.end()) return &it->second;
  const bool full = buckets_.size() >= kMaxPeers;
  if (!create) return full && others_ ? &*others_ : nullptr;
  if (full && now >= next_sweep_) {
    // A full bucket says the same as none.
    std::erase_if(buckets_, [now](const auto& entry) { return entry.second.Full(now); });
    next_sweep_ = now + kSweepInterval;
  }
  if (buckets_.size() < kMaxPeers)
    return &buckets_.emplace(address, TokenBucket(per_second_, burst_, now)).first->second;
  if (!others_) others_.emplace(per_second_, burst_, now);
  return &*others_;
}

}  // namespace saccade
