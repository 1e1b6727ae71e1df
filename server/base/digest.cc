#include "base/digest.h"

#include <xxhash.h>

namespace saccade {

void DigestBuilder::Append(const void* data, size_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  const uint64_t length = size;
  const auto* l = reinterpret_cast<const unsigned char*>(&length);
  bytes_.insert(bytes_.end(), l, l + sizeof(length));
  bytes_.insert(bytes_.end(), p, p + size);
}

DigestBuilder& DigestBuilder::Field(std::string_view bytes) {
  bytes_.push_back('s');
  Append(bytes.data(), bytes.size());
  return *this;
}

DigestBuilder& DigestBuilder::Field(uint64_t value) {
  bytes_.push_back('u');
  Append(&value, sizeof(value));
  return *this;
}

DigestBuilder& DigestBuilder::Field(const Digest128& digest) {
  bytes_.push_back('d');
  Append(&digest, sizeof(digest));
  return *this;
}

DigestBuilder& DigestBuilder::Field(std::span<const int32_t> values) {
  bytes_.push_back('i');
  Append(values.data(), values.size_bytes());
  return *this;
}

Digest128 DigestBuilder::Finish() const {
  const XXH128_hash_t h = XXH3_128bits(bytes_.data(), bytes_.size());
  return {h.high64, h.low64};
}

Digest128 DigestBytes(std::string_view domain, std::span<const uint8_t> bytes) {
  const XXH128_hash_t body = XXH3_128bits(bytes.data(), bytes.size());
  return DigestBuilder(domain)
      .Field(static_cast<uint64_t>(bytes.size()))
      .Field(Digest128{body.high64, body.low64})
      .Finish();
}

}  // namespace saccade
