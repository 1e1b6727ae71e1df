#pragma once
// Harness of the op tests: puts host values into device memory, surrounds every tensor with guard
// bytes, runs ops and reads the results. It touches device memory through Backend and Stream only,
// so it serves every backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/bf16.h"
#include "tensor/backend.h"

namespace saccade::optest {

struct BackendFactory {
  std::string name;
  // `threads`: that compute inside one op; a backend without such threads ignores it.
  std::function<absl::StatusOr<std::unique_ptr<Backend>>(int threads)> make;
};

// GoogleTest finds it by name and uses it in messages.
inline void PrintTo(const BackendFactory& factory, std::ostream* out) { *out << factory.name; }

// Turns an error into an exception, which GoogleTest reports as a failure of the test.
inline void Must(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
template <class T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return std::move(*value);
}

// A dense tensor on the host. Values are held as F64, each exactly representable in `dtype`.
struct HostTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  std::vector<double> values;

  int64_t numel() const {
    return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
  }
  double at(int64_t row, int64_t column) const {
    return values[static_cast<size_t>(row * dims[1] + column)];
  }
  double& at(int64_t row, int64_t column) {
    return values[static_cast<size_t>(row * dims[1] + column)];
  }
  HostTensor Rows(int64_t begin, int64_t end) const {
    HostTensor part{dtype, dims, {}};
    const int64_t width = numel() / dims[0];
    part.dims[0] = end - begin;
    part.values.assign(values.begin() + begin * width, values.begin() + end * width);
    return part;
  }
};

// The rows of all parts, one after another.
inline HostTensor Stack(const std::vector<HostTensor>& parts) {
  HostTensor all = parts.at(0);
  for (size_t i = 1; i < parts.size(); ++i) {
    all.dims[0] += parts[i].dims[0];
    all.values.insert(all.values.end(), parts[i].values.begin(), parts[i].values.end());
  }
  return all;
}

inline double RoundTo(DType dtype, double value) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<double>(static_cast<float>(value));
    case DType::kBf16:
      return static_cast<double>(RoundToBf16(static_cast<float>(value)));
    default:
      return value;
  }
}

inline void Encode(DType dtype, double value, std::byte* to) {
  const auto put = [to](auto element) { std::memcpy(to, &element, sizeof(element)); };
  switch (dtype) {
    case DType::kF32:
      return put(static_cast<float>(value));
    case DType::kBf16:
      return put(F32ToBf16(static_cast<float>(value)));
    case DType::kI32:
      return put(static_cast<int32_t>(value));
    case DType::kI64:
      return put(static_cast<int64_t>(value));
    case DType::kU8:
      return put(static_cast<uint8_t>(value));
    default:
      throw std::runtime_error("dtype");
  }
}

inline double Decode(DType dtype, const std::byte* from) {
  const auto get = [from](auto element) {
    std::memcpy(&element, from, sizeof(element));
    return element;
  };
  switch (dtype) {
    case DType::kF32:
      return static_cast<double>(get(float{}));
    case DType::kBf16:
      return static_cast<double>(Bf16ToF32(get(uint16_t{})));
    case DType::kI32:
      return get(int32_t{});
    case DType::kI64:
      return static_cast<double>(get(int64_t{}));
    case DType::kU8:
      return get(uint8_t{});
    default:
      throw std::runtime_error("dtype");
  }
}

inline HostTensor Random(DType dtype, std::vector<int64_t> dims, uint32_t seed,
                         double scale = 1.0) {
  HostTensor tensor{dtype, std::move(dims), {}};
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0.0, scale);
  tensor.values.resize(static_cast<size_t>(tensor.numel()));
  for (double& value : tensor.values) value = RoundTo(dtype, normal(generator));
  return tensor;
}

inline HostTensor Ints(std::vector<int64_t> values, DType dtype = DType::kI32) {
  return {dtype,
          {static_cast<int64_t>(values.size())},
          std::vector<double>(values.begin(), values.end())};
}

// How the rows of a rank-2 tensor lie: `lead` elements before the first, `pad` between rows.
// Neither need be a multiple of anything.
struct Layout {
  int64_t lead = 0;
  int64_t pad = 0;
};
inline constexpr Layout kDense{};
inline constexpr Layout kStrided{3, 5};

class Rig;

// A tensor in device memory amid guard bytes. Owned by its Rig.
class DeviceTensor {
 public:
  const TensorView& view() const { return view_; }
  operator TensorView() const {
    return view_;
  }  // NOLINT(google-explicit-constructor): reads like a view in op calls

 private:
  friend class Rig;
  std::unique_ptr<Buffer> buffer_;
  std::unique_ptr<Buffer> staging_;
  TensorView view_;
  std::vector<std::byte> expected_;  // what the whole buffer held when it was made
  bool writable_ = false;
};

// One backend, one stream, and the tensors of one test.
class Rig {
 public:
  explicit Rig(const BackendFactory& factory, int threads = 1)
      : backend_(Must(factory.make(threads))), stream_(Must(backend_->NewStream())) {}
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;
  ~Rig() {
    if (!stream_->Synchronize().ok()) ADD_FAILURE() << "the stream ended with an error";
    for (const auto& tensor : tensors_) CheckGuards(*tensor);
  }

  Backend& backend() { return *backend_; }
  Stream& stream() { return *stream_; }
  const Ops& ops() const { return backend_->ops(); }

  // An input, checked to be unchanged at the end.
  const DeviceTensor& In(const HostTensor& host, Layout layout = kDense) {
    return Make(host, layout, false);
  }
  // An output full of poison (NaN as a float).
  const DeviceTensor& Out(DType dtype, std::vector<int64_t> dims, Layout layout = kDense) {
    return Make({dtype, std::move(dims), {}}, layout, true);
  }
  // A tensor that is read and written.
  const DeviceTensor& InOut(const HostTensor& host, Layout layout = kDense) {
    return Make(host, layout, true);
  }

  // Waits for the work so far, checks the guard bytes and returns the values.
  HostTensor Read(const DeviceTensor& tensor) {
    const std::vector<std::byte> bytes = CheckGuards(tensor);
    HostTensor host;
    host.dtype = tensor.view_.dtype;
    host.dims.assign(tensor.view_.dims.begin(), tensor.view_.dims.begin() + tensor.view_.rank);
    host.values.resize(static_cast<size_t>(host.numel()));
    for (int64_t i = 0; i < host.numel(); ++i) {
      host.values[static_cast<size_t>(i)] = Decode(host.dtype, bytes.data() + OffsetOf(tensor, i));
    }
    return host;
  }

  std::unique_ptr<PackedWeight> Pack(const std::vector<HostTensor>& parts, DType dtype) {
    const Parts host(parts);
    return Must(backend_->PackLinear(host.views, dtype));
  }
  std::unique_ptr<PackedWeight> PackGated(const HostTensor& gate, const HostTensor& up,
                                          DType dtype) {
    const Parts host({gate, up});
    return Must(backend_->PackGated(host.views[0], host.views[1], dtype));
  }

 private:
  static constexpr size_t kGuardBytes = 256;
  static constexpr std::byte kPoison{0xFF};

  // Weights as host memory.
  struct Parts {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<TensorView> views;
    explicit Parts(const std::vector<HostTensor>& parts) {
      for (const HostTensor& part : parts) {
        const size_t size = DTypeSize(part.dtype);
        bytes.emplace_back(static_cast<size_t>(part.numel()) * size);
        for (size_t i = 0; i < part.values.size(); ++i) {
          Encode(part.dtype, part.values[i], bytes.back().data() + i * size);
        }
        views.push_back(TensorView::Dense(bytes.back().data(), part.dtype, MemKind::kHost,
                                          {part.dims[0], part.dims[1]}));
      }
    }
  };

  // Byte offset in the buffer of element `i` in row-major order.
  static size_t OffsetOf(const DeviceTensor& tensor, int64_t i) {
    const TensorView& view = tensor.view_;
    int64_t at = 0;
    for (int d = view.rank - 1; d >= 0; --d) {
      at += i % view.dim(d) * view.strides[static_cast<size_t>(d)];
      i /= view.dim(d);
    }
    return static_cast<size_t>(view.data - tensor.buffer_->data()) +
           static_cast<size_t>(at) * DTypeSize(view.dtype);
  }

  const DeviceTensor& Make(const HostTensor& host, Layout layout, bool writable) {
    auto tensor = std::make_unique<DeviceTensor>();
    const size_t element = DTypeSize(host.dtype);
    const size_t rank = host.dims.size();
    const int64_t pad = rank == 2 ? layout.pad : 0;
    const int64_t lead = rank == 2 ? layout.lead : 0;
    const int64_t extent = rank == 2 ? host.dims[0] * (host.dims[1] + pad) : host.numel();
    const size_t bytes = 2 * kGuardBytes + static_cast<size_t>(lead + extent) * element;
    tensor->buffer_ = Must(backend_->Allocate(bytes, MemKind::kDevice));
    tensor->staging_ = Must(backend_->Allocate(bytes, MemKind::kPinned));
    tensor->writable_ = writable;
    TensorView& view = tensor->view_;
    view.data = tensor->buffer_->data() + kGuardBytes + static_cast<size_t>(lead) * element;
    view.dtype = host.dtype;
    view.mem = MemKind::kDevice;
    view.rank = static_cast<uint8_t>(rank);
    int64_t stride = 1;
    for (size_t d = rank; d-- > 0;) {
      view.dims[d] = host.dims[d];
      view.strides[d] = stride;
      stride *= host.dims[d] + (d + 1 == rank ? pad : 0);
    }
    tensor->expected_.assign(bytes, kPoison);
    for (size_t i = 0; i < host.values.size(); ++i) {
      Encode(host.dtype, host.values[i],
             tensor->expected_.data() + OffsetOf(*tensor, static_cast<int64_t>(i)));
    }
    std::memcpy(tensor->staging_->data(), tensor->expected_.data(), bytes);
    const auto size = static_cast<int64_t>(bytes);
    Must(stream_->Copy(tensor->buffer_->View(DType::kU8, {size}),
                       tensor->staging_->View(DType::kU8, {size})));
    tensors_.push_back(std::move(tensor));
    return *tensors_.back();
  }

  // Reads the buffer back; every byte that no op may write must be what it was.
  std::vector<std::byte> CheckGuards(const DeviceTensor& tensor) {
    std::vector<std::byte> bytes(tensor.expected_.size());
    const auto size = static_cast<int64_t>(bytes.size());
    const std::unique_ptr<Buffer> back = Must(backend_->Allocate(bytes.size(), MemKind::kPinned));
    Must(stream_->Copy(back->View(DType::kU8, {size}), tensor.buffer_->View(DType::kU8, {size})));
    Must(stream_->Synchronize());
    std::memcpy(bytes.data(), back->data(), bytes.size());
    std::vector<std::byte> guards = bytes;
    if (tensor.writable_) {
      for (int64_t i = 0; i < tensor.view_.numel(); ++i) {
        const size_t at = OffsetOf(tensor, i);
        std::copy_n(tensor.expected_.begin() + static_cast<std::ptrdiff_t>(at),
                    DTypeSize(tensor.view_.dtype),
                    guards.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    EXPECT_TRUE(guards == tensor.expected_)
        << "bytes outside " << tensor.view_.DebugString() << " were written, or an input was";
    return bytes;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<DeviceTensor>> tensors_;
};

// ---- comparison
// ----------------------------------------------------------------------------------------------------

inline constexpr double kUlpF32 = 0x1p-24;  // half a unit in the last place of 1.0
inline constexpr double kUlpBf16 =
    0x1p-8;  // rounding, and once more where an error below crosses a tie

// Error allowed for a sum of K products whose absolute values add up to `magnitude`, accumulated in
// F32.
inline double SumTolerance(int64_t k, double magnitude) {
  return kUlpF32 * (8.0 + 4.0 * std::sqrt(static_cast<double>(k))) * magnitude;
}

// `value`, stored as `dtype`, must lie within `tolerance` of `expected` before that rounding.
inline testing::AssertionResult Near(double value, double expected, double tolerance, DType dtype) {
  const double stored = std::abs(expected) * (dtype == DType::kBf16 ? kUlpBf16 : kUlpF32);
  if (std::abs(value - expected) <= tolerance + stored) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << value << " is not within " << tolerance + stored << " of " << expected;
}

// Equal bit for bit (of the values; all NaNs count as one).
inline testing::AssertionResult SameBits(const HostTensor& a, const HostTensor& b) {
  if (a.dtype != b.dtype || a.dims != b.dims) return testing::AssertionFailure() << "shapes differ";
  for (size_t i = 0; i < a.values.size(); ++i) {
    const bool same = (std::isnan(a.values[i]) && std::isnan(b.values[i])) ||
                      std::memcmp(&a.values[i], &b.values[i], sizeof(double)) == 0;
    if (!same) {
      return testing::AssertionFailure()
             << "element " << i << ": " << a.values[i] << " and " << b.values[i];
    }
  }
  return testing::AssertionSuccess();
}

// ---- paged sequences
// -----------------------------------------------------------------------------------------------

// Where the tokens of one sequence lie: pages in the order of the page table, part-full anywhere.
// Tokens are numbered in that order; their positions are the pages' own.
struct PagedSequence {
  static constexpr int32_t kBlockTokens = 16;
  struct Page {
    int32_t block = 0;
    int32_t length = 0;
    int32_t position = 0;
  };
  std::vector<Page> pages;

  int32_t tokens() const {
    return std::accumulate(pages.begin(), pages.end(), 0,
                           [](int32_t sum, const Page& page) { return sum + page.length; });
  }
  int32_t Slot(int32_t token) const {
    const auto [page, offset] = Find(token);
    return page.block * kBlockTokens + offset;
  }
  int32_t Position(int32_t token) const {
    const auto [page, offset] = Find(token);
    return page.position + offset;
  }

 private:
  std::pair<Page, int32_t> Find(int32_t token) const {
    for (const Page& page : pages) {
      if (token < page.length) return {page, token};
      token -= page.length;
    }
    throw std::runtime_error("token outside the sequence");
  }
};

// Hands out the blocks of a pool in a shuffled order.
class BlockShuffle {
 public:
  BlockShuffle(uint32_t blocks, uint32_t seed) : order_(blocks) {
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), std::mt19937(seed));
  }
  PagedSequence Sequence(const std::vector<int32_t>& lengths, int32_t first_position = 0) {
    PagedSequence sequence;
    for (int32_t length : lengths) {
      sequence.pages.push_back({order_.at(next_++), length, first_position});
      first_position += length;
    }
    return sequence;
  }

 private:
  std::vector<int32_t> order_;
  size_t next_ = 0;
};

// Query rows [begin, end) of a sequence, of which the cache then holds tokens [0, end).
struct Chunk {
  const PagedSequence* sequence = nullptr;
  int32_t begin = 0;
  int32_t end = 0;
  std::vector<int32_t> limits{};  // the last position that each row sees; empty: its own

  int32_t Limit(int32_t row) const {
    return limits.empty() ? sequence->Position(row) : limits.at(static_cast<size_t>(row - begin));
  }
};

// `rope`: false gives every row position 0, where RoPE is the identity.
inline PagedBatch MakeBatch(Rig& rig, const std::vector<Chunk>& chunks, bool rope = true) {
  std::vector<int64_t> row_begin = {0};
  std::vector<int64_t> page_begin = {0};
  std::vector<int64_t> pages;
  std::vector<int64_t> page_len;
  std::vector<int64_t> page_pos;
  std::vector<int64_t> row_pos;
  std::vector<int64_t> row_limit;
  std::vector<int64_t> row_slot;
  PagedBatch batch;
  for (const Chunk& chunk : chunks) {
    int32_t token = 0;
    for (const PagedSequence::Page& page : chunk.sequence->pages) {
      if (token >= chunk.end) break;
      pages.push_back(page.block);
      page_len.push_back(std::min(page.length, chunk.end - token));
      page_pos.push_back(page.position);
      token += page.length;
    }
    for (int32_t row = chunk.begin; row < chunk.end; ++row) {
      row_pos.push_back(rope ? chunk.sequence->Position(row) : 0);
      row_limit.push_back(chunk.Limit(row));
      row_slot.push_back(chunk.sequence->Slot(row));
    }
    const auto count = static_cast<int64_t>(pages.size());
    batch.max_pages = std::max(batch.max_pages, static_cast<int32_t>(count - page_begin.back()));
    row_begin.push_back(static_cast<int64_t>(row_pos.size()));
    page_begin.push_back(count);
  }
  batch.num_seqs = static_cast<int32_t>(chunks.size());
  batch.num_rows = static_cast<int32_t>(row_pos.size());
  batch.num_pages = static_cast<int32_t>(pages.size());
  batch.row_begin = rig.In(Ints(row_begin));
  batch.page_begin = rig.In(Ints(page_begin));
  batch.pages = rig.In(Ints(pages));
  batch.page_len = rig.In(Ints(page_len));
  batch.page_pos = rig.In(Ints(page_pos));
  batch.row_pos = rig.In(Ints(row_pos));
  batch.row_limit = rig.In(Ints(row_limit));
  batch.row_slot = rig.In(Ints(row_slot));
  return batch;
}

}  // namespace saccade::optest
