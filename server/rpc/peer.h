#pragma once
// Peers: whose call it is, as far as the network tells, and rates by it.
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"
#include "session/token_bucket.h"

namespace saccade {

// What counts as one client: the address of a gRPC peer ("ipv4:10.0.0.7:41234") without its port.
// Of IPv6 the /64 network, because one host has all of it; an IPv4 address in IPv6 is that address.
// Anything else: the peer as it stands.
std::string PeerAddress(std::string_view peer);
// A loopback address or a Unix socket.
bool IsOnThisHost(std::string_view peer);

// One token bucket per peer address, for a bounded number of them. Any thread.
class PeerBuckets {
 public:
  static constexpr size_t kMaxPeers = 4096;

  // `per_second` and `burst` > 0.
  PeerBuckets(double per_second, double burst) : per_second_(per_second), burst_(burst) {}

  // As TokenBucket. A peer that finds no place shares one bucket with all others that found none.
  std::optional<Micros> Take(const std::string& address, TimePoint now, double amount = 1.0);
  std::optional<Micros> WaitFor(const std::string& address, TimePoint now, double amount = 1.0);
  size_t peers() const;
  // Of every peer, from now on; the burst is one second's worth.
  void SetRate(double per_second, TimePoint now);

 private:
  // Null: nothing was ever taken, and `create` is false.
  TokenBucket* FindLocked(const std::string& address, TimePoint now, bool create);

  mutable std::mutex mu_;
  double per_second_;
  double burst_;
  std::unordered_map<std::string, TokenBucket> buckets_;
  std::optional<TokenBucket> others_;
  TimePoint next_sweep_{};
};

}  // namespace saccade
