#include "base/memory_budget.h"

#include <cstdio>

#include "base/strings.h"

namespace saccade {

std::string Mebibytes(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", static_cast<double>(bytes) / (1 << 20));
  return text;
}

MemoryHold& MemoryHold::operator=(MemoryHold&& other) noexcept {
  if (this != &other) {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    kind_ = other.kind_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

absl::Status MemoryHold::Resize(uint64_t bytes) {
  if (budget_ == nullptr) return absl::OkStatus();
  if (bytes > bytes_) {
    RETURN_IF_ERROR(budget_->Take(kind_, bytes - bytes_));
  } else {
    budget_->GiveBack(kind_, bytes_ - bytes);
  }
  bytes_ = bytes;
  return absl::OkStatus();
}

void MemoryHold::Release() {
  if (budget_ == nullptr) return;
  budget_->GiveBack(kind_, bytes_);
  budget_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<MemoryHold> MemoryBudget::Hold(MemoryKind kind, uint64_t bytes) {
  RETURN_IF_ERROR(Take(kind, bytes));
  return MemoryHold(this, kind, bytes);
}

absl::Status MemoryBudget::Take(MemoryKind kind, uint64_t bytes) {
  uint64_t total = total_.load(std::memory_order_relaxed);
  do {
    if (bytes > limit_ || total > limit_ - bytes) {
      ErrorInfo info;
      info.reason = Reason::kOutOfMemory;
      return MakeError(absl::StatusCode::kResourceExhausted,
                       StrCat("memory: ", Mebibytes(bytes), " MiB for ",
                              kMemoryKindNames[static_cast<size_t>(kind)],
                              " do not fit the budget; held: ", Sum()),
                       info);
    }
  } while (!total_.compare_exchange_weak(total, total + bytes, std::memory_order_relaxed));
  kinds_[static_cast<size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  return absl::OkStatus();
}

void MemoryBudget::GiveBack(MemoryKind kind, uint64_t bytes) {
  kinds_[static_cast<size_t>(kind)].fetch_sub(bytes, std::memory_order_relaxed);
  total_.fetch_sub(bytes, std::memory_order_relaxed);
}

std::string MemoryBudget::Sum() const {
  std::string sum;
  for (size_t k = 0; k < kMemoryKinds; ++k) {
    const uint64_t bytes = held(static_cast<MemoryKind>(k));
    if (bytes == 0) continue;
    StrAppend(&sum, sum.empty() ? "" : " + ", kMemoryKindNames[k], " ", Mebibytes(bytes));
  }
  return StrCat(sum.empty() ? "nothing" : sum, " = ", Mebibytes(held()), " of ", Mebibytes(limit_),
                " MiB");
}

}  // namespace saccade
