#pragma once
// 128-bit content digests (XXH3-128). Every field that goes in is tagged and length-prefixed, so
// two different records never hash the same bytes. Not cryptographic: identity is decided by
// comparing content after the hash.
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace saccade {

struct Digest128 {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const Digest128&, const Digest128&) = default;
};

class DigestBuilder {
 public:
  // `domain` separates kinds of keys, e.g. "kv.block.v1".
  explicit DigestBuilder(std::string_view domain) { Field(domain); }
  DigestBuilder& Field(std::string_view bytes);
  DigestBuilder& Field(uint64_t value);
  DigestBuilder& Field(const Digest128& digest);
  DigestBuilder& Field(std::span<const int32_t> values);
  Digest128 Finish() const;

 private:
  void Append(const void* data, size_t size);
  std::vector<unsigned char> bytes_;  // small records only; bulk bytes go through DigestBytes first
};

// One-shot digest of bulk bytes under a domain.
Digest128 DigestBytes(std::string_view domain, std::span<const uint8_t> bytes);

}  // namespace saccade

template <>
struct std::hash<saccade::Digest128> {
  size_t operator()(const saccade::Digest128& d) const noexcept {
    return static_cast<size_t>(d.low);
  }
};
