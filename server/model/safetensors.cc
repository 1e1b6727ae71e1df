#include "model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/strings.h"
#include "model/json_util.h"

namespace saccade {
namespace {

struct DTypeRow {
  std::string_view name;
  size_t size;
  std::optional<DType> dtype;  // nullopt: the server has no such type; the tensor is kept
};

constexpr std::array<DTypeRow, 15> kDTypes = {{{"F32", 4, DType::kF32},
                                               {"BF16", 2, DType::kBf16},
                                               {"F16", 2, DType::kF16},
                                               {"F64", 8, DType::kF64},
                                               {"I64", 8, DType::kI64},
                                               {"I32", 4, DType::kI32},
                                               {"U8", 1, DType::kU8},
                                               {"BOOL", 1, DType::kU8},
                                               {"I8", 1, std::nullopt},
                                               {"I16", 2, std::nullopt},
                                               {"U16", 2, std::nullopt},
                                               {"U32", 4, std::nullopt},
                                               {"U64", 8, std::nullopt},
                                               {"F8_E4M3", 1, std::nullopt},
                                               {"F8_E5M2", 1, std::nullopt}}};

const DTypeRow* FindDType(std::string_view name) {
  const auto* row = std::find_if(kDTypes.begin(), kDTypes.end(),
                                 [&](const DTypeRow& r) { return r.name == name; });
  return row == kDTypes.end() ? nullptr : row;
}

}  // namespace

class SafetensorsFile::Mapping {
 public:
  Mapping(void* data, size_t size) : data_(data), size_(size) {}
  ~Mapping() { munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::span<const uint8_t> bytes() const { return {static_cast<const uint8_t*>(data_), size_}; }

 private:
  void* data_;
  size_t size_;
};

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    if (error == ENOENT) return absl::NotFoundError(StrCat(path, ": no such file"));
    return absl::InvalidArgumentError(StrCat(path, ": ", std::strerror(error)));
  }
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(StrCat(path, ": not a regular file"));
  }
  if (info.st_size < 8) {
    close(fd);
    return absl::InvalidArgumentError(
        StrCat(path, ": ", info.st_size, " bytes are too few for a safetensors file"));
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  close(fd);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        StrCat(path, ": cannot map ", size, " bytes: ", std::strerror(error)));
  }
  SafetensorsFile file;
  file.mapping_ = std::make_shared<const Mapping>(data, size);
  file.path_ = path;
  RETURN_IF_ERROR(file.ParseHeader(file.mapping_->bytes()));
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(std::span<const uint8_t> bytes,
                                                       std::string_view name) {
  SafetensorsFile file;
  file.path_ = std::string(name);
  RETURN_IF_ERROR(file.ParseHeader(bytes));
  return file;
}

absl::Status SafetensorsFile::ParseHeader(std::span<const uint8_t> bytes) {
  const auto error = [this](auto&&... parts) {
    return absl::InvalidArgumentError(StrCat(path_, ": ", parts...));
  };
  if (bytes.size() < 8) return error(bytes.size(), " bytes are too few for a safetensors file");
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < 8; ++i) header_bytes |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  if (header_bytes > kMaxHeaderBytes) {
    return error("header of ", header_bytes, " bytes, more than the limit of ", kMaxHeaderBytes);
  }
  if (header_bytes > bytes.size() - 8) {
    return error("header of ", header_bytes, " bytes in a file of ", bytes.size());
  }
  header_ = bytes.subspan(8, header_bytes);
  data_ = bytes.subspan(8 + header_bytes);

  // Root, tensor or metadata, array: three levels.
  const std::string_view text(reinterpret_cast<const char*>(header_.data()), header_.size());
  ASSIGN_OR_RETURN(const Json root,
                   ParseJson(text, path_, {.max_bytes = kMaxHeaderBytes, .max_depth = 3}));
  const JsonView view(root, path_);
  if (!root.is_object()) return view.Error("header: expected an object");

  std::vector<std::pair<const std::string*, const Entry*>> order;
  for (const auto& item : root.items()) {
    const std::string& name = item.key();
    ASSIGN_OR_RETURN(const JsonView member, view.Get(name));
    if (name == "__metadata__") {
      if (!member.json().is_object()) return member.Error("expected an object");
      for (const auto& pair : member.json().items()) {
        ASSIGN_OR_RETURN(metadata_[pair.key()], member.String(pair.key()));
      }
      continue;
    }
    Entry entry;
    ASSIGN_OR_RETURN(entry.dtype, member.String("dtype"));
    const DTypeRow* row = FindDType(entry.dtype);
    if (row == nullptr) return member.Error(StrCat("unknown dtype \"", entry.dtype, "\""));
    ASSIGN_OR_RETURN(const JsonView shape, member.Get("shape"));
    ASSIGN_OR_RETURN(entry.dims, shape.AsInts(0, std::numeric_limits<int64_t>::max()));
    ASSIGN_OR_RETURN(const JsonView offsets_view, member.Get("data_offsets"));
    ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                     offsets_view.AsInts(0, std::numeric_limits<int64_t>::max()));
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      return offsets_view.Error("expected [begin, end] with begin <= end");
    }
    const auto end = static_cast<size_t>(offsets[1]);
    if (end > data_.size()) {
      return member.Error(StrCat("ends at byte ", end, " of the data, the file holds ",
                                 data_.size(), " (truncated?)"));
    }
    entry.offset = static_cast<size_t>(offsets[0]);
    entry.bytes = end - entry.offset;
    size_t size = row->size;
    bool overflow = false;
    bool empty = false;
    for (const int64_t dim : entry.dims) {
      empty = empty || dim == 0;
      overflow = overflow || __builtin_mul_overflow(size, static_cast<size_t>(dim), &size);
    }
    if ((overflow && !empty) || (empty ? 0 : size) != entry.bytes) {
      return member.Error(StrCat("shape [", absl::StrJoin(entry.dims, ", "), "] of ", entry.dtype,
                                 " does not take the ", entry.bytes, " bytes of its data_offsets"));
    }
    const auto [it, inserted] = entries_.emplace(name, std::move(entry));
    order.emplace_back(&it->first, &it->second);
  }

  // The data section must be tiled exactly: a byte that belongs to two tensors or to none means
  // that the header and the data do not belong together.
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->offset, a.second->bytes) <
           std::pair(b.second->offset, b.second->bytes);
  });
  size_t expected = 0;
  for (const auto& [name, entry] : order) {
    if (entry->offset != expected) {
      return error(*name, ": data begins at byte ", entry->offset, ", expected ", expected,
                   entry->offset < expected ? " (overlap)" : " (gap)");
    }
    expected += entry->bytes;
  }
  if (expected != data_.size()) {
    return error("the tensors take ", expected, " bytes of data, the file holds ", data_.size());
  }

  for (const auto& [name, entry] : order) {
    const size_t alignment = FindDType(entry->dtype)->size;
    const uint8_t* begin = data_.data() + entry->offset;
    if (entry->bytes == 0 || reinterpret_cast<uintptr_t>(begin) % alignment == 0) continue;
    std::vector<uint64_t>& copy = realigned_[*name];
    copy.resize((entry->bytes + 7) / 8);
    std::memcpy(copy.data(), begin, entry->bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const uint8_t>> SafetensorsFile::Bytes(std::string_view name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    return absl::NotFoundError(StrCat(path_, ": no tensor \"", name, "\""));
  }
  return data_.subspan(it->second.offset, it->second.bytes);
}

absl::StatusOr<TensorView> SafetensorsFile::Tensor(std::string_view name) const {
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes, Bytes(name));
  const Entry& entry = entries_.find(name)->second;
  const DTypeRow* row = FindDType(entry.dtype);
  if (!row->dtype) {
    return absl::UnimplementedError(
        StrCat(path_, ": ", name, ": dtype ", entry.dtype, " is not supported"));
  }
  if (entry.dims.size() > TensorView::kMaxRank) {
    return absl::UnimplementedError(StrCat(path_, ": ", name, ": rank ", entry.dims.size(),
                                           ", at most ", TensorView::kMaxRank, " is supported"));
  }
  const void* data = bytes.data();
  const auto copy = realigned_.find(name);
  if (copy != realigned_.end()) data = copy->second.data();
  // TensorView has no read-only form; the pages are mapped without write permission.
  TensorView view = TensorView::Dense(const_cast<void*>(data), *row->dtype, MemKind::kHost, {});
  view.rank = static_cast<uint8_t>(entry.dims.size());
  int64_t stride = 1;
  for (size_t i = entry.dims.size(); i-- > 0;) {
    view.dims[i] = entry.dims[i];
    view.strides[i] = stride;
    stride *= std::max<int64_t>(entry.dims[i], 1);
  }
  return view;
}

}  // namespace saccade
