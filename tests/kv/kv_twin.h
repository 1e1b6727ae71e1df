#pragma once
// A K/V cache and the naive model of it, driven by the same list of operations and compared after
// each. An operation names what it works on by a number modulo what there is, so that every part of
// a list is a list: one that fails is made small by taking parts out.
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "tests/kv/kv_geometries.h"
#include "tests/kv/kv_testing.h"
#include "tests/kv/naive_kv.h"

namespace saccade {

struct KvOp {
  enum class Kind : uint8_t {
    kOpen,       // a: prompt
    kClose,      // a: sequence
    kPoison,     // a: sequence, closed as poisoned
    kDestroy,    // a: sequence, never closed
    kFork,       // a: sequence
    kPublish,    // a: sequence, b: tokens
    kFlush,      //
    kBegin,      // one that is open is dropped
    kReserve,    // a: sequence, b: tokens more
    kSavepoint,  //
    kRollback,   // a: savepoint
    kCommit,     //
    kAbandon,    // drops the transaction
    kSetAside,   // a: modality, b: blocks
    kReturn,     // a: reserve
    kExtend,     // a: sequence, b: tokens more and reserve
    kDrop,       // a: sequence, b: reserve
    kDamage,     // a: block; breaks the cache, to see that it is noticed
  };
  Kind kind = Kind::kOpen;
  uint32_t a = 0;
  uint32_t b = 0;
};

inline constexpr std::array<std::string_view, 18> kKvOpNames = {
    "open",    "close",     "poison",  "destroy",   "fork",     "publish",
    "flush",   "begin",     "reserve", "savepoint", "rollback", "commit",
    "abandon", "set_aside", "return",  "extend",    "drop",     "damage"};

inline std::vector<KvOp> RandomOps(std::mt19937& rng, size_t count) {
  using Kind = KvOp::Kind;
  // How often each comes, in the order of the kinds; damage never.
  constexpr std::array<uint32_t, 17> weights = {60, 34, 3,  3, 16, 60, 1,  50, 90,
                                                16, 10, 50, 8, 10, 8,  20, 12};
  std::discrete_distribution<uint32_t> kinds(weights.begin(), weights.end());
  std::vector<KvOp> ops(count);
  for (KvOp& op : ops) {
    op.kind = static_cast<Kind>(kinds(rng));
    op.a = rng() % 4096;
    op.b = rng() % 4096;
  }
  return ops;
}

class KvTwin {
 public:
  // `prompts` is the seed of the prompts.
  KvTwin(const Geometry& g, uint32_t prompts)
      : g_(g), prompts_(MakePrompts(g, prompts)), model_(g, prompts_) {
    cache_ = KvCache::Create(OptionsOf(g)).value();
  }

  KvCache& cache() { return *cache_; }
  const NaiveKv& model() const { return model_; }
  std::map<int, std::unique_ptr<Sequence>>& live() { return live_; }

  // Does it to both; what differs afterwards, or nothing.
  std::string Apply(const KvOp& op) {
    std::string wrong = Do(op);
    return wrong.empty() ? Compare() : wrong;
  }

  // Ends everything; nothing may be left.
  std::string Finish() {
    transaction_.reset();
    model_.Abandon();
    while (!live_.empty()) {
      std::string wrong = Apply({KvOp::Kind::kClose, 0, 0});
      if (!wrong.empty()) return wrong;
    }
    while (!reserves_.empty()) {
      std::string wrong = Apply({KvOp::Kind::kReturn, 0, 0});
      if (!wrong.empty()) return wrong;
    }
    cache_->FlushIdle();
    return cache_->stats().free_blocks == g_.num_blocks ? "" : "blocks are lost";
  }

 private:
  static constexpr size_t kMaxLive = 8;
  static constexpr size_t kMaxReserves = 3;

  static std::vector<std::shared_ptr<const Timeline>> MakePrompts(const Geometry& g,
                                                                  uint32_t seed) {
    std::mt19937 rng(seed);
    return Prompts(g, rng);
  }
  template <class Map>
  static typename Map::iterator At(Map& all, uint32_t which) {
    return std::next(all.begin(), static_cast<std::ptrdiff_t>(which % all.size()));
  }

  std::string Do(const KvOp& op) {
    using Kind = KvOp::Kind;
    const bool needs_sequence = op.kind == Kind::kClose || op.kind == Kind::kPoison ||
                                op.kind == Kind::kDestroy || op.kind == Kind::kFork ||
                                op.kind == Kind::kPublish || op.kind == Kind::kReserve ||
                                op.kind == Kind::kExtend || op.kind == Kind::kDrop;
    const bool needs_reserve =
        op.kind == Kind::kReturn || op.kind == Kind::kExtend || op.kind == Kind::kDrop;
    if ((needs_sequence && live_.empty()) || (needs_reserve && reserves_.empty())) return "";
    const auto s = needs_sequence ? At(live_, op.a) : live_.end();
    switch (op.kind) {
      case Kind::kOpen:
        if (live_.size() >= kMaxLive) return "";
        model_.Open(next_id_, op.a % prompts_.size());
        live_[next_id_++] = cache_->Open(prompts_[op.a % prompts_.size()], kNow);
        return "";
      case Kind::kClose:
      case Kind::kPoison:
        model_.Close(s->first, op.kind == Kind::kPoison);
        cache_->Close(std::move(s->second), kNow, op.kind == Kind::kPoison);
        live_.erase(s);
        return "";
      case Kind::kDestroy:
        model_.Close(s->first, false);
        live_.erase(s);
        return "";
      case Kind::kFork:
        if (live_.size() >= kMaxLive) return "";
        model_.Fork(next_id_, s->first);
        live_[next_id_++] = cache_->Fork(*s->second);
        return "";
      case Kind::kPublish: {
        // Mostly all that there is.
        const uint32_t reserved = s->second->reserved_tokens();
        const uint32_t tokens = op.b % 4 == 0 ? op.b / 4 % (reserved + 2) : reserved;
        model_.Publish(s->first, tokens);
        cache_->Publish(*s->second, tokens, kNow);
        return "";
      }
      case Kind::kFlush:
        if (op.a % 8 != 0) return "";  // else little would ever be evicted
        model_.Flush();
        cache_->FlushIdle();
        return "";
      case Kind::kBegin:
        model_.Begin();
        transaction_ = cache_->Begin(kNow);
        savepoints_.clear();
        return "";
      case Kind::kReserve: {
        if (!transaction_) return "";
        // Some tokens more, or the whole prompt.
        const uint32_t more = op.b / 4 % (2 * g_.block_tokens + 2);
        const uint32_t upto = op.b % 4 == 0 ? s->second->timeline().num_tokens()
                                            : s->second->reserved_tokens() + more;
        const absl::Status status = transaction_->Reserve(*s->second, upto);
        const auto expected = !model_.open()                ? absl::StatusCode::kFailedPrecondition
                              : model_.Plan(s->first, upto) ? absl::StatusCode::kOk
                                                            : absl::StatusCode::kResourceExhausted;
        return status.code() == expected ? "" : StrCat("Reserve gave: ", status.ToString());
      }
      case Kind::kSavepoint:
        if (!transaction_) return "";
        savepoints_.push_back(transaction_->Savepoint());
        return savepoints_.back() == model_.Savepoint() ? "" : "Savepoint";
      case Kind::kRollback: {
        if (!transaction_ || savepoints_.empty()) return "";
        const size_t k = op.a % savepoints_.size();
        transaction_->RollbackTo(savepoints_[k]);
        model_.RollbackTo(savepoints_[k]);
        savepoints_.resize(k + 1);
        return "";
      }
      case Kind::kCommit: {
        if (!transaction_) return "";
        const std::vector<BlockCopy> copies = std::move(*transaction_).Commit();
        transaction_.reset();
        return model_.open() ? Copied(model_.Commit(), copies)
                             : std::string(copies.empty() ? "" : "copies of a dead transaction");
      }
      case Kind::kAbandon:
        transaction_.reset();
        model_.Abandon();
        return "";
      case Kind::kSetAside: {
        if (reserves_.size() >= kMaxReserves) return "";
        const uint32_t m = op.a % kModalities;
        const uint32_t blocks = op.b % (g_.num_blocks / 3 + 2);
        std::unique_ptr<KvReserve> reserve =
            cache_->SetAside(static_cast<Modality>(m), blocks, kNow);
        const bool expected = model_.SetAside(next_id_, m, blocks);
        if ((reserve != nullptr) != expected) return "SetAside";
        if (reserve != nullptr) reserves_[next_id_++] = std::move(reserve);
        return "";
      }
      case Kind::kReturn: {
        const auto reserve = At(reserves_, op.a);
        model_.Return(reserve->first);
        reserves_.erase(reserve);
        return "";
      }
      case Kind::kExtend: {
        const auto from = At(reserves_, op.b / 64);
        const uint32_t upto = s->second->reserved_tokens() + op.b % 64 % (2 * g_.block_tokens + 2);
        std::vector<BlockCopy> copies;
        const absl::Status status = cache_->Extend(*s->second, upto, *from->second, copies);
        if (!model_.MayExtend(s->first, from->first)) {
          return status.code() == absl::StatusCode::kFailedPrecondition
                     ? ""
                     : StrCat("Extend gave: ", status.ToString());
        }
        const auto expected = model_.Extend(s->first, upto, from->first);
        const auto code = expected ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted;
        if (status.code() != code) return StrCat("Extend gave: ", status.ToString());
        return Copied(expected.value_or(NaiveKv::Copies()), copies);
      }
      case Kind::kDrop: {
        const auto to = At(reserves_, op.b);
        model_.Drop(s->first, to->first);
        cache_->Drop(std::move(s->second), *to->second);
        live_.erase(s);
        return "";
      }
      case Kind::kDamage: {
        const auto b = BlockId(static_cast<int32_t>(op.a % g_.num_blocks));
        const BlockPool::Block& block = KvCacheTestPeer::block(*cache_, b);
        if (block.refs == 0 && block.indexed && !block.claimed) {
          KvCacheTestPeer::EvictIdle(*cache_, b);
        }
        return "";
      }
    }
    return "";
  }

  // Binds a block of the model to a block of the cache, for as long as it is held or idle.
  bool Same(int block, BlockId real) {
    const auto at = real_.emplace(block, real).first;
    if (at->second != real) return false;
    return model_of_.emplace(real, block).first->second == block;
  }

  std::string Copied(const NaiveKv::Copies& expected, const std::vector<BlockCopy>& copies) {
    if (copies.size() != expected.size()) return "the number of copies";
    // The sources may be free by now, and targets may be what others were.
    for (size_t i = 0; i < copies.size(); ++i) {
      const auto from = real_.find(expected[i].first);
      if (from == real_.end() || from->second != copies[i].from) return "the source of a copy";
    }
    Forget();
    for (size_t i = 0; i < copies.size(); ++i) {
      if (!Same(expected[i].second, copies[i].to)) return "the target of a copy";
    }
    return "";
  }

  // Blocks that the model has freed are nobody's.
  void Forget() {
    for (auto it = real_.begin(); it != real_.end();) {
      if (model_.blocks().count(it->first) > 0) {
        ++it;
      } else {
        const auto back = model_of_.find(it->second);
        if (back != model_of_.end() && back->second == it->first) model_of_.erase(back);
        it = real_.erase(it);
      }
    }
  }

  std::string Compare() {
    const absl::Status invariants = cache_->CheckInvariants();
    if (!invariants.ok()) return std::string(invariants.message());
    const KvStats stats = cache_->stats();
    if (stats.free_blocks != model_.Free()) return StrCat("free blocks: ", stats.free_blocks);
    for (size_t m = 0; m < kModalities; ++m) {
      const PartitionStats& real = stats.partitions[m];
      const NaiveKv::Partition& expected = model_.partition(m);
      const uint32_t idle = model_.Idle(m);
      const auto wrong = [&](std::string_view what) {
        return StrCat(kModalityNames[m], ": ", what);
      };
      if (real.idle != idle) return wrong("idle blocks");
      if (real.held != model_.Used(m) - idle) return wrong("held blocks");
      if (real.evictions != expected.evictions) return wrong("evictions");
      if (real.hit_tokens != expected.hit || real.miss_tokens != expected.miss) {
        return wrong("hit and miss tokens");
      }
      if (std::abs(real.hit_rate_ema - expected.ema) > 1e-12) return wrong("hit rate");
    }
    for (size_t p = 0; p < prompts_.size(); ++p) {
      const uint32_t tokens = cache_->CachedTokens(*prompts_[p]);
      if (tokens != model_.CachedTokens(p))
        return StrCat("prompt ", p, " finds ", tokens, " tokens");
    }
    Forget();
    if (live_.size() != model_.sequences().size()) return "the number of sequences";
    for (const auto& [id, s] : live_) {
      const NaiveKv::Sequence& expected = model_.sequences().at(id);
      const auto wrong = [id = id](std::string_view what) {
        return StrCat("sequence ", id, ": ", what);
      };
      if (s->reserved_tokens() != expected.reserved) return wrong("reserved tokens");
      if (s->committed_tokens() != expected.committed) return wrong("committed tokens");
      if (s->cached_tokens() != expected.cached) return wrong("cached tokens");
      const std::vector<PageRef> table = s->PageTable(expected.reserved);
      if (table.size() != expected.pages.size()) return wrong("number of pages");
      uint32_t position = 0;
      for (size_t i = 0; i < table.size(); ++i) {
        if (table[i].position != position) return wrong("position of a page");
        position = std::min(model_.PageEnd(expected, i), expected.reserved);
        if (table[i].len != position - table[i].position) return wrong("length of a page");
        if (!Same(expected.pages[i], table[i].block)) return wrong("block of a page");
      }
    }
    for (const auto& [id, reserve] : reserves_) {
      if (reserve->blocks() != model_.reserves().at(id).blocks.size()) return "blocks of a reserve";
    }
    return "";
  }

  const Geometry& g_;
  const std::vector<std::shared_ptr<const Timeline>> prompts_;
  NaiveKv model_;
  std::unique_ptr<KvCache> cache_;
  std::map<int, std::unique_ptr<Sequence>> live_;
  std::map<int, std::unique_ptr<KvReserve>> reserves_;
  std::optional<KvTransaction> transaction_;
  std::vector<size_t> savepoints_;
  int next_id_ = 0;
  std::map<int, BlockId> real_;
  std::map<BlockId, int> model_of_;
};

// A list that can be run again: pool, seed of the prompts, operations.
struct KvCase {
  size_t geometry = 0;
  uint32_t prompts = 0;
  std::vector<KvOp> ops;

  // What went wrong, and `ops` cut after the operation that did it; nothing when all agrees.
  std::string Run() {
    KvTwin twin(Geometries()[geometry], prompts);
    for (size_t i = 0; i < ops.size(); ++i) {
      std::string wrong = twin.Apply(ops[i]);
      if (wrong.empty()) continue;
      ops.resize(i + 1);
      return wrong;
    }
    return twin.Finish();
  }

  // The smallest list found that still fails.
  void Shrink() {
    for (bool smaller = true; smaller;) {
      smaller = false;
      for (size_t chunk = (ops.size() + 1) / 2; chunk > 0; chunk /= 2) {
        for (size_t begin = 0; begin < ops.size();) {
          KvCase less = *this;
          const auto first = less.ops.begin() + static_cast<std::ptrdiff_t>(begin);
          const auto last =
              first + static_cast<std::ptrdiff_t>(std::min(chunk, ops.size() - begin));
          less.ops.erase(first, last);
          if (less.Run().empty()) {
            begin += chunk;
          } else {
            *this = std::move(less);
            smaller = true;
          }
        }
      }
      for (size_t i = 0; i < ops.size(); ++i) {
        for (uint32_t KvOp::*number : {&KvOp::a, &KvOp::b}) {
          for (const uint32_t to : {0U, ops[i].*number % 4, ops[i].*number / 2}) {
            if (i >= ops.size() || to >= ops[i].*number) continue;
            KvCase less = *this;
            less.ops[i].*number = to;
            if (less.Run().empty()) continue;
            *this = std::move(less);
            smaller = true;
          }
        }
      }
    }
  }

  std::string Print() const {
    std::string out = StrCat("case ", geometry, " ", prompts, "\n");
    for (const KvOp& op : ops) {
      out += StrCat(kKvOpNames[static_cast<size_t>(op.kind)], " ", op.a, " ", op.b, "\n");
    }
    return out;
  }
  static std::optional<KvCase> Parse(const std::string& text) {
    std::istringstream in(text);
    KvCase out;
    std::string word;
    if (!(in >> word >> out.geometry >> out.prompts) || word != "case" ||
        out.geometry >= Geometries().size()) {
      return std::nullopt;
    }
    KvOp op;
    while (in >> word >> op.a >> op.b) {
      const auto name = std::find(kKvOpNames.begin(), kKvOpNames.end(), word);
      if (name == kKvOpNames.end()) return std::nullopt;
      op.kind = static_cast<KvOp::Kind>(name - kKvOpNames.begin());
      out.ops.push_back(op);
    }
    return out;
  }
};

}  // namespace saccade
