#include "model/tensor_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::array<StoredType, 15> kTypes = {{{"F32", 4, DType::kF32},
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

}  // namespace

const StoredType* FindStoredType(std::string_view name) {
  const auto* type = std::find_if(kTypes.begin(), kTypes.end(),
                                  [&](const StoredType& t) { return t.name == name; });
  return type == kTypes.end() ? nullptr : type;
}

class TensorFile::Mapping {
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

absl::StatusOr<std::span<const uint8_t>> TensorFile::Map(const std::string& path, size_t min_bytes,
                                                         std::string_view kind) {
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
  if (info.st_size < static_cast<off_t>(min_bytes)) {
    close(fd);
    return absl::InvalidArgumentError(
        StrCat(path, ": ", info.st_size, " bytes are too few for a ", kind, " file"));
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  close(fd);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        StrCat(path, ": cannot map ", size, " bytes: ", std::strerror(error)));
  }
  mapping_ = std::make_shared<const Mapping>(data, size);
  path_ = path;
  return mapping_->bytes();
}

std::optional<size_t> TensorFile::DenseBytes(const StoredType& type,
                                             std::span<const int64_t> dims) {
  size_t size = type.size;
  bool overflow = false;
  bool empty = false;
  for (const int64_t dim : dims) {
    empty = empty || dim == 0;
    overflow = overflow || __builtin_mul_overflow(size, static_cast<size_t>(dim), &size);
  }
  if (empty) return 0;
  if (overflow) return std::nullopt;
  return size;
}

void TensorFile::Realign() {
  for (const auto& [name, entry] : entries_) {
    const size_t alignment = FindStoredType(entry.dtype)->size;
    const uint8_t* begin = data_.data() + entry.offset;
    if (entry.bytes == 0 || reinterpret_cast<uintptr_t>(begin) % alignment == 0) continue;
    std::vector<uint64_t>& copy = realigned_[name];
    copy.resize((entry.bytes + 7) / 8);
    std::memcpy(copy.data(), begin, entry.bytes);
  }
}

absl::StatusOr<std::span<const uint8_t>> TensorFile::Bytes(std::string_view name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    return absl::NotFoundError(StrCat(path_, ": no tensor \"", name, "\""));
  }
  return data_.subspan(it->second.offset, it->second.bytes);
}

absl::StatusOr<TensorView> TensorFile::Tensor(std::string_view name) const {
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes, Bytes(name));
  const Entry& entry = entries_.find(name)->second;
  const StoredType* type = FindStoredType(entry.dtype);
  if (!type->dtype) {
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
  TensorView view = TensorView::Dense(const_cast<void*>(data), *type->dtype, MemKind::kHost, {});
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
