#pragma once
// Backend: the only door to a device. Owns nothing but the way to make buffers, streams, packed
// weights and K/V storage.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "tensor/ops.h"
#include "tensor/tensor.h"

namespace saccade {

// Owned memory. Freed on destruction; the owner sees to it that no enqueued work still needs it.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual std::byte* data() const = 0;  // 64-byte aligned
  virtual size_t size() const = 0;
  virtual MemKind kind() const = 0;
  TensorView View(DType dtype, std::initializer_list<int64_t> dims, size_t offset = 0) const {
    return TensorView::Dense(data() + offset, dtype, kind(), dims);
  }
};

// A point in a stream's order.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool Done() const = 0;
  virtual absl::Status Wait()
      const = 0;  // blocks the host; returns the stream's error if work failed
};

// An in-order queue of work on one device. One thread at a time may enqueue.
class Stream {
 public:
  virtual ~Stream() = default;
  // Same dtype and shape (rank <= 4, any strides with last stride 1). Host memory on one side must
  // be kPinned and stay alive and unchanged until an event recorded later is done.
  virtual absl::Status Copy(TensorView dst, TensorView src) = 0;
  virtual absl::StatusOr<std::unique_ptr<Event>> Record() = 0;
  virtual absl::Status Synchronize() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view kind() const = 0;  // "cpu", "ref", "cuda"
  virtual std::string Describe() const = 0;   // one line: device, instruction set, threads
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes, MemKind kind) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> NewStream() = 0;
  virtual const Ops& ops() const = 0;

  // Packs the rows of `parts` (host views [n_i, k], F32 or BF16) stacked one after another, as
  // `dtype` (F32 or BF16).
  virtual absl::StatusOr<std::unique_ptr<PackedWeight>> PackLinear(
      std::span<const TensorView> parts, DType dtype) = 0;
  // For GatedLinear: gate and up are [I, K].
  virtual absl::StatusOr<std::unique_ptr<PackedWeight>> PackGated(TensorView gate, TensorView up,
                                                                  DType dtype) = 0;
  virtual absl::StatusOr<std::unique_ptr<KvStorage>> NewKvStorage(const KvGeometry& geometry,
                                                                  uint32_t num_blocks) = 0;
  // Bytes that NewKvStorage would allocate.
  virtual uint64_t KvBytes(const KvGeometry& geometry, uint32_t num_blocks) const {
    return uint64_t{num_blocks} * geometry.block_tokens * geometry.BytesPerToken();
  }
  // From now on steps run: packing must not take the threads that they compute with.
  virtual void BeginServing() {}
};

// Copies a host tensor to new device memory as `dtype` (converted on the host), waiting for it. For
// loading only.
absl::StatusOr<std::unique_ptr<Buffer>> Upload(Backend& backend, Stream& stream, TensorView host,
                                               DType dtype);

}  // namespace saccade
