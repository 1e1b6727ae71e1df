#include "model/torch_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/tokenizer.h"
#include "model/torch_zip.h"

namespace saccade {
namespace {

// --- values of the pickle ---

enum class Kind : uint8_t {
  kMark,
  kNone,
  kBool,
  kInt,
  kText,
  kTuple,
  kDict,  // dict and OrderedDict
  kOrderedDictType,
  kRebuildTensor,
  kStorageType,
  kStorage,
  kTensor,
};

struct Value {
  Kind kind = Kind::kNone;
  int64_t number = 0;           // kInt, kBool; elements of kStorage
  std::string_view text;        // kText; record of kStorage; StoredType of kStorageType
  std::vector<uint32_t> items;  // kTuple; kDict: key, value, key, value
  uint32_t storage = 0;         // kTensor: a kStorage; kStorage: its kStorageType
  int64_t offset = 0;           // kTensor: elements
  std::vector<int64_t> dims;    // kTensor
};

struct StorageName {
  std::string_view torch;
  std::string_view type;  // a StoredType
};
constexpr std::array<StorageName, 10> kStorages = {{{"FloatStorage", "F32"},
                                                    {"BFloat16Storage", "BF16"},
                                                    {"HalfStorage", "F16"},
                                                    {"DoubleStorage", "F64"},
                                                    {"LongStorage", "I64"},
                                                    {"IntStorage", "I32"},
                                                    {"ShortStorage", "I16"},
                                                    {"CharStorage", "I8"},
                                                    {"ByteStorage", "U8"},
                                                    {"BoolStorage", "BOOL"}}};

// Runs a pickle of protocol 2 as torch.save writes it. An operation makes at most one value, and
// every operation is at least a byte, so memory is bounded; nothing recurses.
class Unpickler {
 public:
  Unpickler(std::span<const uint8_t> bytes, std::string origin)
      : bytes_(bytes), origin_(std::move(origin)) {}

  // The value that the pickle is of.
  absl::StatusOr<uint32_t> Run();
  const Value& at(uint32_t index) const { return values_[index]; }

  absl::Status Error(std::string_view message) const {
    return absl::InvalidArgumentError(StrCat(origin_, ": at byte ", op_, ": ", message));
  }
  absl::Status Unsupported(std::string_view message) const {
    return absl::UnimplementedError(StrCat(origin_, ": at byte ", op_, ": ", message));
  }

 private:
  absl::StatusOr<std::span<const uint8_t>> Take(size_t count) {
    if (count > bytes_.size() - next_) return Error("the pickle ends too early");
    const auto taken = bytes_.subspan(next_, count);
    next_ += count;
    return taken;
  }
  absl::StatusOr<uint64_t> Number(size_t count) {  // little-endian, unsigned
    ASSIGN_OR_RETURN(const auto taken, Take(count));
    uint64_t value = 0;
    for (size_t i = 0; i < count; ++i) value |= uint64_t{taken[i]} << (8 * i);
    return value;
  }
  absl::StatusOr<std::string_view> Line() {
    const auto rest = bytes_.subspan(next_);
    const auto end = std::find(rest.begin(), rest.end(), '\n');
    if (end == rest.end()) return Error("the pickle ends too early");
    const auto count = static_cast<size_t>(end - rest.begin());
    next_ += count + 1;
    return std::string_view(reinterpret_cast<const char*>(rest.data()), count);
  }

  void Push(Value value) {
    stack_.push_back(static_cast<uint32_t>(values_.size()));
    values_.push_back(std::move(value));
  }
  absl::StatusOr<uint32_t> Pop() {
    if (stack_.empty() || at(stack_.back()).kind == Kind::kMark) return Error("the stack is empty");
    const uint32_t index = stack_.back();
    stack_.pop_back();
    return index;
  }
  // What is above the last mark, and the mark goes.
  absl::StatusOr<std::vector<uint32_t>> PopMark() {
    size_t begin = stack_.size();
    while (begin > 0 && at(stack_[begin - 1]).kind != Kind::kMark) --begin;
    if (begin == 0) return Error("there is no mark");
    std::vector<uint32_t> items(stack_.begin() + static_cast<ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin - 1);
    return items;
  }
  absl::Status PushTuple(size_t count) {
    Value tuple;
    tuple.kind = Kind::kTuple;
    tuple.items.resize(count);
    for (size_t i = count; i-- > 0;) {
      ASSIGN_OR_RETURN(tuple.items[i], Pop());
    }
    Push(std::move(tuple));
    return absl::OkStatus();
  }
  absl::Status Put(uint64_t slot) {
    if (slot >= TorchFile::kMaxMemo || slot > memo_.size()) return Error("a memo out of order");
    if (stack_.empty()) return Error("the stack is empty");
    if (slot == memo_.size()) memo_.push_back(0);
    memo_[slot] = stack_.back();
    return absl::OkStatus();
  }
  absl::Status Get(uint64_t slot) {
    if (slot >= memo_.size()) return Error("a memo that was never put");
    stack_.push_back(memo_[slot]);
    return absl::OkStatus();
  }
  absl::Status SetItems(const std::vector<uint32_t>& items) {
    if (stack_.empty() || at(stack_.back()).kind != Kind::kDict) return Error("not a dict");
    if (items.size() % 2 != 0) return Error("a key without its value");
    std::vector<uint32_t>& dict = values_[stack_.back()].items;
    dict.insert(dict.end(), items.begin(), items.end());
    return absl::OkStatus();
  }

  absl::Status Global();
  absl::Status Storage();
  absl::Status Reduce();
  absl::Status Build();
  absl::StatusOr<std::vector<int64_t>> Sizes(uint32_t tuple) const;
  absl::Status Step(uint8_t op);

  std::span<const uint8_t> bytes_;
  std::string origin_;
  size_t next_ = 0;
  size_t op_ = 0;  // where the current operation is
  std::vector<Value> values_;
  std::vector<uint32_t> stack_;
  std::vector<uint32_t> memo_;
};

absl::Status Unpickler::Global() {
  ASSIGN_OR_RETURN(const std::string_view module, Line());
  ASSIGN_OR_RETURN(const std::string_view name, Line());
  Value value;
  if (module == "torch._utils" && name == "_rebuild_tensor_v2") {
    value.kind = Kind::kRebuildTensor;
  } else if (module == "collections" && name == "OrderedDict") {
    value.kind = Kind::kOrderedDictType;
  } else {
    const auto* storage = std::find_if(kStorages.begin(), kStorages.end(),
                                       [&](const StorageName& s) { return s.torch == name; });
    if (module != "torch" || storage == kStorages.end()) {
      const auto shown = [](std::string_view text) {
        return IsValidUtf8(text) ? text.substr(0, 100) : std::string_view("?");
      };
      return Unsupported(StrCat("\"", shown(module), ".", shown(name),
                                "\" is not part of a dict of tensors; nothing is run"));
    }
    value.kind = Kind::kStorageType;
    value.text = storage->type;
  }
  Push(std::move(value));
  return absl::OkStatus();
}

// ("storage", type, record, device, elements)
absl::Status Unpickler::Storage() {
  ASSIGN_OR_RETURN(const uint32_t index, Pop());
  const std::vector<uint32_t>& items = at(index).items;
  if (at(index).kind != Kind::kTuple || items.size() != 5 || at(items[0]).kind != Kind::kText ||
      at(items[0]).text != "storage" || at(items[1]).kind != Kind::kStorageType ||
      at(items[2]).kind != Kind::kText || at(items[3]).kind != Kind::kText ||
      at(items[4]).kind != Kind::kInt || at(items[4]).number < 0) {
    return Error("not a storage");
  }
  Value value;
  value.kind = Kind::kStorage;
  value.storage = items[1];
  value.text = at(items[2]).text;
  value.number = at(items[4]).number;
  Push(std::move(value));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> Unpickler::Sizes(uint32_t tuple) const {
  const Value& value = at(tuple);
  if (value.kind != Kind::kTuple || value.items.size() > TorchFile::kMaxRank) {
    return Error("not a shape");
  }
  std::vector<int64_t> sizes;
  for (const uint32_t item : value.items) {
    if (at(item).kind != Kind::kInt || at(item).number < 0) return Error("not a shape");
    sizes.push_back(at(item).number);
  }
  return sizes;
}

absl::Status Unpickler::Reduce() {
  ASSIGN_OR_RETURN(const uint32_t arguments, Pop());
  ASSIGN_OR_RETURN(const uint32_t callable, Pop());
  if (at(arguments).kind != Kind::kTuple) return Error("arguments that are no tuple");
  const std::vector<uint32_t>& items = at(arguments).items;
  Value value;
  if (at(callable).kind == Kind::kOrderedDictType) {
    if (!items.empty()) return Unsupported("an OrderedDict of something");
    value.kind = Kind::kDict;
  } else if (at(callable).kind == Kind::kRebuildTensor) {
    // storage, offset, size, stride, requires_grad, backward hooks
    if (items.size() != 6 || at(items[0]).kind != Kind::kStorage ||
        at(items[1]).kind != Kind::kInt || at(items[1]).number < 0 ||
        at(items[4]).kind != Kind::kBool || at(items[5]).kind != Kind::kDict ||
        !at(items[5]).items.empty()) {
      return Error("not a plain tensor");
    }
    ASSIGN_OR_RETURN(value.dims, Sizes(items[2]));
    ASSIGN_OR_RETURN(const std::vector<int64_t> strides, Sizes(items[3]));
    if (strides.size() != value.dims.size()) return Error("a shape and other strides");
    const bool empty = std::find(value.dims.begin(), value.dims.end(), 0) != value.dims.end();
    int64_t stride = 1;
    for (size_t i = strides.size(); i-- > 0 && !empty;) {
      if (value.dims[i] == 1) continue;
      if (strides[i] != stride) return Unsupported("a tensor that is not contiguous");
      if (__builtin_mul_overflow(stride, value.dims[i], &stride)) return Error("too large");
    }
    value.kind = Kind::kTensor;
    value.storage = items[0];
    value.offset = at(items[1]).number;
  } else {
    return Error("a call of what is no function");
  }
  Push(std::move(value));
  return absl::OkStatus();
}

// A module's state dict carries versions of its layers as an attribute, which nothing reads.
absl::Status Unpickler::Build() {
  ASSIGN_OR_RETURN(const uint32_t state, Pop());
  if (at(state).kind != Kind::kDict || stack_.empty() || at(stack_.back()).kind != Kind::kDict) {
    return Unsupported("attributes of what is no OrderedDict");
  }
  return absl::OkStatus();
}

absl::Status Unpickler::Step(uint8_t op) {
  Value value;
  switch (op) {
    case '(':  // MARK
      value.kind = Kind::kMark;
      break;
    case '}':  // EMPTY_DICT
      value.kind = Kind::kDict;
      break;
    case ')':  // EMPTY_TUPLE
      value.kind = Kind::kTuple;
      break;
    case 'N':
      break;
    case 0x88:    // NEWTRUE
    case 0x89: {  // NEWFALSE
      value.kind = Kind::kBool;
      value.number = op == 0x88 ? 1 : 0;
      break;
    }
    case 'K':    // BININT1
    case 'M':    // BININT2
    case 'J': {  // BININT, signed
      ASSIGN_OR_RETURN(const uint64_t number, Number(op == 'K' ? 1 : op == 'M' ? 2 : 4));
      value.kind = Kind::kInt;
      value.number = op == 'J' ? static_cast<int32_t>(static_cast<uint32_t>(number))
                               : static_cast<int64_t>(number);
      break;
    }
    case 0x8a: {  // LONG1, signed, of that many bytes
      ASSIGN_OR_RETURN(const uint64_t count, Number(1));
      if (count > 8) return Error("a number of more than 64 bits");
      ASSIGN_OR_RETURN(uint64_t number, Number(count));
      if (count > 0 && count < 8 && (number >> (8 * count - 1)) != 0) {
        number |= ~uint64_t{0} << (8 * count);
      }
      value.kind = Kind::kInt;
      std::memcpy(&value.number, &number, sizeof(number));
      break;
    }
    case 'X': {  // BINUNICODE
      ASSIGN_OR_RETURN(const uint64_t count, Number(4));
      if (count > TorchFile::kMaxTextBytes) return Error("too long a text");
      ASSIGN_OR_RETURN(const auto text, Take(count));
      value.kind = Kind::kText;
      value.text = {reinterpret_cast<const char*>(text.data()), text.size()};
      if (!IsValidUtf8(value.text)) return Error("text that is not UTF-8");
      break;
    }
    case 'q':    // BINPUT
    case 'r': {  // LONG_BINPUT
      ASSIGN_OR_RETURN(const uint64_t slot, Number(op == 'q' ? 1 : 4));
      return Put(slot);
    }
    case 'h':    // BINGET
    case 'j': {  // LONG_BINGET
      ASSIGN_OR_RETURN(const uint64_t slot, Number(op == 'h' ? 1 : 4));
      return Get(slot);
    }
    case 0x85:  // TUPLE1
    case 0x86:  // TUPLE2
    case 0x87:  // TUPLE3
      return PushTuple(op - 0x84U);
    case 't': {  // TUPLE
      value.kind = Kind::kTuple;
      ASSIGN_OR_RETURN(value.items, PopMark());
      break;
    }
    case 's': {  // SETITEM
      ASSIGN_OR_RETURN(const uint32_t item, Pop());
      ASSIGN_OR_RETURN(const uint32_t key, Pop());
      return SetItems({key, item});
    }
    case 'u': {  // SETITEMS
      ASSIGN_OR_RETURN(const std::vector<uint32_t> items, PopMark());
      return SetItems(items);
    }
    case 'c':
      return Global();
    case 'Q':  // BINPERSID
      return Storage();
    case 'R':
      return Reduce();
    case 'b':
      return Build();
    default:
      return Unsupported(StrCat("operation ", int{op}, " is not part of a dict of tensors"));
  }
  Push(std::move(value));
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Unpickler::Run() {
  ASSIGN_OR_RETURN(const uint64_t header, Number(2));
  if (header != 0x0280) return Unsupported("not a pickle of protocol 2");
  for (;;) {
    op_ = next_;
    if (values_.size() > TorchFile::kMaxValues) return Error("too many values");
    ASSIGN_OR_RETURN(const auto op, Take(1));
    if (op[0] == '.') break;
    RETURN_IF_ERROR(Step(op[0]));
  }
  ASSIGN_OR_RETURN(const uint32_t result, Pop());
  if (!stack_.empty() || next_ != bytes_.size()) return Error("more than one value");
  return result;
}

}  // namespace

absl::StatusOr<TorchFile> TorchFile::Open(const std::string& path) {
  TorchFile file;
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes, file.Map(path, 1, "torch"));
  RETURN_IF_ERROR(file.Read(bytes));
  return file;
}

absl::StatusOr<TorchFile> TorchFile::Parse(std::span<const uint8_t> bytes, std::string_view name) {
  TorchFile file;
  file.path_ = std::string(name);
  RETURN_IF_ERROR(file.Read(bytes));
  return file;
}

absl::Status TorchFile::Read(std::span<const uint8_t> bytes) {
  data_ = bytes;
  ASSIGN_OR_RETURN(const auto zip, ReadZip(bytes, path_));
  const auto order = zip.find("byteorder");
  if (order != zip.end()) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + order->second.offset,
                                order->second.bytes);
    if (text != "little") {
      return absl::UnimplementedError(StrCat(path_, ": byteorder: only \"little\" is supported"));
    }
  }
  const auto pickle = zip.find("data.pkl");
  if (pickle == zip.end()) {
    return absl::InvalidArgumentError(StrCat(path_, ": there is no data.pkl"));
  }
  if (pickle->second.bytes > kMaxPickleBytes) {
    return absl::InvalidArgumentError(StrCat(path_, ": data.pkl has ", pickle->second.bytes,
                                             " bytes, more than ", kMaxPickleBytes));
  }
  Unpickler unpickler(bytes.subspan(pickle->second.offset, pickle->second.bytes),
                      StrCat(path_, ": data.pkl"));
  ASSIGN_OR_RETURN(const uint32_t root, unpickler.Run());
  if (unpickler.at(root).kind != Kind::kDict) return unpickler.Error("not a dict of tensors");
  const std::vector<uint32_t>& items = unpickler.at(root).items;
  for (size_t i = 0; i < items.size(); i += 2) {
    const Value& key = unpickler.at(items[i]);
    const Value& tensor = unpickler.at(items[i + 1]);
    if (key.kind != Kind::kText) return unpickler.Error("a key that is no text");
    const auto error = [&](auto&&... parts) {
      return absl::InvalidArgumentError(StrCat(path_, ": ", key.text, ": ", parts...));
    };
    if (tensor.kind != Kind::kTensor) return error("not a tensor");
    const Value& storage = unpickler.at(tensor.storage);
    const StoredType& type = *FindStoredType(unpickler.at(storage.storage).text);
    const auto record = zip.find(StrCat("data/", storage.text));
    if (record == zip.end()) return error("there is no data/", storage.text);
    size_t storage_bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(storage.number), type.size, &storage_bytes) ||
        storage_bytes != record->second.bytes) {
      return error("data/", storage.text, " has ", record->second.bytes, " bytes, expected ",
                   storage.number, " values of ", type.name);
    }
    Entry entry;
    entry.dtype = type.name;
    entry.dims = tensor.dims;
    const std::optional<size_t> size = DenseBytes(type, entry.dims);
    size_t begin = 0;
    if (!size || __builtin_mul_overflow(static_cast<size_t>(tensor.offset), type.size, &begin) ||
        begin > storage_bytes || *size > storage_bytes - begin) {
      return error("does not fit data/", storage.text, " of ", storage_bytes, " bytes");
    }
    entry.bytes = *size;
    entry.offset = record->second.offset + begin;
    if (!entries_.emplace(key.text, std::move(entry)).second) return error("is there twice");
  }
  Realign();
  return absl::OkStatus();
}

}  // namespace saccade
