// Any bytes are a file of torch.save: refused, or every tensor lies inside it.
#include <cstdint>
#include <cstdlib>

#include "model/torch_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = saccade::TorchFile::Parse({data, size}, "f");
  if (!file.ok()) return 0;
  unsigned sum = 0;
  for (const auto& [name, entry] : file->entries()) {
    const auto bytes = file->Bytes(name);
    if (!bytes.ok() || bytes->size() != entry.bytes) std::abort();
    for (const uint8_t byte : *bytes) sum += byte;
    const auto tensor = file->Tensor(name);
    if (tensor.ok() && !bytes->empty() && tensor->data == nullptr) std::abort();
  }
  return sum == 1 ? -1 : 0;  // reads every byte
}
