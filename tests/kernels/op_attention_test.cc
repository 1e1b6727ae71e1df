// The K/V cache and attention on every backend: QkvRopeAppend, PagedAttention, ReadKv, CopyBlocks,
// DenseAttention.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/backends.h"

namespace saccade::optest {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBf16 = DType::kBf16;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- the oracle
// ----------------------------------------------------------------------------------------------------

struct Expected {
  double value = 0;
  double tolerance = 0;
};

// One head of one row in F64. `k` and `v` give element d of token t; only tokens in `visible` take
// part.
template <class Key, class Value>
std::vector<Expected> AttendOracle(const std::vector<double>& q, double scale,
                                   const std::vector<int64_t>& visible, const Key& k,
                                   const Value& v, DType dtype) {
  const auto dim = static_cast<int64_t>(q.size());
  std::vector<double> scores;
  double largest = -std::numeric_limits<double>::infinity();
  double score_error = 0;
  for (int64_t t : visible) {
    double sum = 0;
    double magnitude = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double product = q[static_cast<size_t>(d)] * k(t, d);
      sum += product;
      magnitude += std::abs(product);
    }
    scores.push_back(sum * scale);
    largest = std::max(largest, sum * scale);
    score_error = std::max(score_error, SumTolerance(dim, magnitude * scale));
  }
  double total = 0;
  for (double& score : scores) {
    score = std::exp(score - largest);
    total += score;
  }
  std::vector<Expected> out(q.size());
  for (int64_t d = 0; d < dim; ++d) {
    double sum = 0;
    double magnitude = 0;
    for (size_t i = 0; i < visible.size(); ++i) {
      const double product = scores[i] / total * v(visible[i], d);
      sum += product;
      magnitude += std::abs(product);
    }
    // Relative error of a weight: twice its score's, the exponential's own, and in BF16 the
    // rounding of the weight.
    const double weight_error = 2 * score_error + 1e-6 + (dtype == kBf16 ? kUlpBf16 : 0.0);
    out[static_cast<size_t>(d)] = {
        sum,
        magnitude * weight_error + SumTolerance(static_cast<int64_t>(visible.size()), magnitude)};
  }
  return out;
}

// ---- a cache filled with chosen values
// -----------------------------------------------------------------------------

struct HeadCase {
  uint32_t q_heads;
  uint32_t kv_heads;
  uint32_t head_dim;
  DType dtype;

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  int64_t q_width() const { return int64_t{q_heads} * head_dim; }
  int64_t kv_width() const { return int64_t{kv_heads} * head_dim; }
};

std::string Describe(const HeadCase& c) {
  return std::to_string(c.q_heads) + "/" + std::to_string(c.kv_heads) + " heads of " +
         std::to_string(c.head_dim) + " " + std::string(DTypeName(c.dtype));
}

const std::vector<HeadCase>& HeadCases() {
  static const std::vector<HeadCase> cases = {
      {1, 1, 8, kF32},   {4, 4, 12, kF32},  {6, 2, 64, kF32},   {3, 1, 72, kF32},
      {8, 4, 32, kF32},  {2, 1, 16, kF32},  {1, 1, 8, kBf16},   {4, 4, 12, kBf16},
      {6, 2, 64, kBf16}, {3, 1, 72, kBf16}, {15, 5, 64, kBf16}, {2, 1, 16, kBf16},
  };
  return cases;
}

// And heads as wide as Gemma's, for tests that take few tokens.
std::vector<HeadCase> HeadCasesAndWide() {
  std::vector<HeadCase> cases = HeadCases();
  cases.push_back({8, 1, 256, kF32});
  cases.push_back({8, 1, 256, kBf16});
  return cases;
}

constexpr uint32_t kLayers = 2;
constexpr uint32_t kLayer = 1;  // the one the tests use
constexpr uint32_t kBlocks = 48;

// K and V with values that a projection yields exactly, whatever its order of accumulation: a row
// is the sum of two of kPatterns patterns whose elements are multiples of 1/16 in [-2, 2]. So the
// cache holds what the oracle reads.
constexpr int64_t kPatterns = 32;

HostTensor Patterns(const HeadCase& c, int64_t rows) {
  HostTensor patterns{c.dtype, {rows, kPatterns}, {}};
  std::mt19937 generator(77);
  for (int64_t i = 0; i < patterns.numel(); ++i) {
    patterns.values.push_back((static_cast<double>(generator() % 65) - 32.0) / 16.0);
  }
  return patterns;
}

struct KvRows {
  HostTensor choice;  // [tokens, kPatterns], two ones in a row
  HostTensor kv;      // [tokens, 2 * kv_width], rows [k | v]
};

KvRows MakeKv(const HeadCase& c, int64_t tokens, uint32_t seed) {
  const HostTensor patterns = Patterns(c, 2 * c.kv_width());
  std::mt19937 generator(seed);
  KvRows rows{
      {c.dtype, {tokens, kPatterns}, std::vector<double>(static_cast<size_t>(tokens * kPatterns))},
      {c.dtype, {tokens, 2 * c.kv_width()}, {}}};
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t one = generator() % kPatterns;
    const int64_t two = (one + 1 + generator() % (kPatterns - 1)) % kPatterns;
    rows.choice.at(token, one) = 1;
    rows.choice.at(token, two) = 1;
    for (int64_t i = 0; i < 2 * c.kv_width(); ++i) {
      rows.kv.values.push_back(patterns.at(i, one) + patterns.at(i, two));
    }
  }
  return rows;
}

// A cache whose every slot holds NaN until a test writes it: what a kernel reads beyond a page's
// length must not matter.
class Cache {
 public:
  Cache(Rig& rig, const HeadCase& c) : rig_(rig), case_(c) {
    KvGeometry geometry;
    geometry.layers = kLayers;
    geometry.kv_heads = c.kv_heads;
    geometry.head_dim = c.head_dim;
    geometry.block_tokens = PagedSequence::kBlockTokens;
    geometry.dtype = c.dtype;
    storage_ = Must(rig.backend().NewKvStorage(geometry, kBlocks));
    const HostTensor q{c.dtype,
                       {c.q_width(), kPatterns},
                       std::vector<double>(static_cast<size_t>(c.q_width() * kPatterns))};
    weight_ = rig.Pack({q, Patterns(c, 2 * c.kv_width())}, c.dtype);

    PagedSequence all;
    for (int32_t block = 0; block < static_cast<int32_t>(kBlocks); ++block) {
      all.pages.push_back(
          {block, PagedSequence::kBlockTokens, block * PagedSequence::kBlockTokens});
    }
    const int64_t width = c.q_width() + 2 * c.kv_width();
    const auto ones = rig.Pack(
        {{c.dtype, {width, 1}, std::vector<double>(static_cast<size_t>(width), 1.0)}}, c.dtype);
    const HostTensor nan{
        c.dtype, {all.tokens(), 1}, std::vector<double>(static_cast<size_t>(all.tokens()), kNan)};
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      Append(*ones, layer, {&all, 0, all.tokens()}, nan);
  }

  KvStorage& storage() { return *storage_; }

  // Writes K and V of the tokens of a chunk.
  void Write(uint32_t layer, const Chunk& chunk, const KvRows& rows) {
    Append(*weight_, layer, chunk, rows.choice);
  }

  // Tokens [0, end) of a sequence as rows [k | v].
  HostTensor Read(uint32_t layer, const PagedSequence& sequence, int32_t end) {
    const int64_t width = case_.kv_width();
    const DeviceTensor& k = rig_.Out(kF32, {end, width}, kStrided);
    const DeviceTensor& v = rig_.Out(kF32, {end, width});
    Must(rig_.ops().ReadKv(rig_.stream(), *storage_, layer, MakeBatch(rig_, {{&sequence, 0, end}}),
                           k, v));
    const HostTensor keys = rig_.Read(k);
    const HostTensor values = rig_.Read(v);
    HostTensor both{
        kF32, {end, 2 * width}, std::vector<double>(static_cast<size_t>(end * 2 * width))};
    for (int64_t row = 0; row < end; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        both.at(row, i) = keys.at(row, i);
        both.at(row, width + i) = values.at(row, i);
      }
    }
    return both;
  }

 private:
  void Append(const PackedWeight& weight, uint32_t layer, const Chunk& chunk, const HostTensor& x) {
    QkvRopeAppendArgs args;
    args.weight = &weight;
    args.x = rig_.In(x);
    args.q = rig_.Out(case_.dtype, {x.dims[0], case_.q_width()});
    args.kv = storage_.get();
    args.layer = layer;
    args.q_heads = case_.q_heads;
    args.batch = MakeBatch(rig_, {chunk}, false);
    Must(rig_.ops().QkvRopeAppend(rig_.stream(), args));
    Must(rig_.stream().Synchronize());
  }

  Rig& rig_;
  HeadCase case_;
  std::unique_ptr<KvStorage> storage_;
  std::unique_ptr<PackedWeight> weight_;
};

HostTensor Attend(Rig& rig, const HeadCase& c, const KvStorage& kv,
                  const std::vector<Chunk>& chunks, const HostTensor& q, Layout layout = kDense) {
  const DeviceTensor& out = rig.Out(c.dtype, {q.dims[0], c.q_width()}, layout);
  PagedAttentionArgs args;
  args.q = rig.In(q, layout);
  args.out = out;
  args.kv = &kv;
  args.layer = kLayer;
  args.q_heads = c.q_heads;
  args.scale = c.scale();
  args.batch = MakeBatch(rig, chunks);
  Must(rig.ops().PagedAttention(rig.stream(), args));
  return rig.Read(out);
}

// Rows of `out` that belong to `chunk`, against the oracle. `kv` holds the sequence's rows [k | v]
// by token.
void CheckAttention(const HeadCase& c, const Chunk& chunk, const HostTensor& kv,
                    const HostTensor& q, const HostTensor& out) {
  const auto dim = static_cast<int64_t>(c.head_dim);
  int failures = 0;
  for (int32_t row = 0; row < chunk.end - chunk.begin; ++row) {
    std::vector<int64_t> visible;
    for (int32_t t = 0; t < chunk.end; ++t) {
      if (chunk.sequence->Position(t) <= chunk.Limit(chunk.begin + row)) visible.push_back(t);
    }
    for (uint32_t head = 0; head < c.q_heads; ++head) {
      const int64_t first = head / (c.q_heads / c.kv_heads) * dim;
      std::vector<double> query;
      for (int64_t d = 0; d < dim; ++d) query.push_back(q.at(row, head * dim + d));
      const auto expected = AttendOracle(
          query, static_cast<double>(c.scale()), visible,
          [&](int64_t t, int64_t d) { return kv.at(t, first + d); },
          [&](int64_t t, int64_t d) { return kv.at(t, c.kv_width() + first + d); }, c.dtype);
      for (int64_t d = 0; d < dim; ++d) {
        const Expected& e = expected[static_cast<size_t>(d)];
        const auto near = Near(out.at(row, head * dim + d), e.value, e.tolerance, c.dtype);
        if (!near && ++failures <= 3) {
          ADD_FAILURE() << "row " << row << " head " << head << " element " << d << ": "
                        << near.message();
        }
      }
    }
  }
  EXPECT_EQ(failures, 0);
}

// Page lengths: a BOS page of one token, full pages, part-full ones in the middle.
const std::vector<std::vector<int32_t>>& PageLengths() {
  static const std::vector<std::vector<int32_t>> lengths = {
      {1},
      {1, 16, 16, 9, 16, 3},
      {16, 16},
      {5, 1, 1, 16, 2},
      {1,  16, 16, 16, 16, 16, 16, 16, 16, 16, 16,
       16, 16, 16, 16, 16, 16, 16, 13, 16, 16, 14},  // 316 tokens
  };
  return lengths;
}

class PagedAttentionTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(PagedAttentionTest, MatchesTheOracle) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    Rig rig(GetParam());
    Cache cache(rig, c);
    BlockShuffle blocks(kBlocks, 7);
    std::vector<PagedSequence> sequences;
    std::vector<KvRows> kv;
    for (size_t i = 0; i < PageLengths().size(); ++i) {
      sequences.push_back(blocks.Sequence(PageLengths()[i], i == 2 ? 100 : 0));
      kv.push_back(MakeKv(c, sequences.back().tokens(), static_cast<uint32_t>(i)));
    }
    // The page table need not be in order of position.
    std::reverse(sequences[3].pages.begin(), sequences[3].pages.end());
    for (size_t i = 0; i < sequences.size(); ++i) {
      cache.Write(kLayer, {&sequences[i], 0, sequences[i].tokens()}, kv[i]);
    }
    const std::vector<std::vector<Chunk>> batches = {
        {{&sequences[0], 0, 1}},
        {{&sequences[1], 60, 61}},
        {{&sequences[1], 0, 61}},
        {{&sequences[4], 303, 316}},
        {{&sequences[4], 0, 316}},
        {{&sequences[3], 0, 25}},
        {{&sequences[1], 58, 60},
         {&sequences[0], 0, 1},
         {&sequences[4], 100, 131},
         {&sequences[2], 24, 32}},
        {{&sequences[4], 315, 316},
         {&sequences[1], 61, 61},
         {&sequences[1], 20, 27},
         {&sequences[3], 24, 25},
         {&sequences[2], 0, 5}},
    };
    for (const std::vector<Chunk>& batch : batches) {
      for (Layout layout : {kDense, kStrided}) {
        int64_t rows = 0;
        for (const Chunk& chunk : batch) rows += chunk.end - chunk.begin;
        const HostTensor q = Random(c.dtype, {rows, c.q_width()}, 99);
        const HostTensor out = Attend(rig, c, cache.storage(), batch, q, layout);
        int64_t row = 0;
        for (const Chunk& chunk : batch) {
          const int64_t end = row + chunk.end - chunk.begin;
          const auto sequence = static_cast<size_t>(chunk.sequence - sequences.data());
          SCOPED_TRACE(testing::Message() << "sequence " << sequence << " rows " << chunk.begin
                                          << " to " << chunk.end);
          CheckAttention(c, chunk, kv[sequence].kv, q.Rows(row, end), out.Rows(row, end));
          row = end;
        }
      }
    }
  }
}

// Rows that see more than themselves, and rows that see less.
TEST_P(PagedAttentionTest, RowsSeeUpToTheirLimit) {
  for (const HeadCase& c : HeadCasesAndWide()) {
    SCOPED_TRACE(Describe(c));
    constexpr int32_t kTokens = 61;
    constexpr int32_t kPrefix = 42;  // ends in the middle of a page
    Rig rig(GetParam());
    Cache cache(rig, c);
    BlockShuffle blocks(kBlocks, 7);
    PagedSequence sequence = blocks.Sequence(PageLengths()[1]);
    const KvRows kv = MakeKv(c, kTokens, 1);
    cache.Write(kLayer, {&sequence, 0, kTokens}, kv);
    const HostTensor q = Random(c.dtype, {kTokens, c.q_width()}, 99);
    const auto chunk = [&](int32_t begin, int32_t end, const auto& limit) {
      Chunk out{&sequence, begin, end};
      for (int32_t row = begin; row < end; ++row) out.limits.push_back(limit(row));
      return out;
    };
    const auto whole = [](int32_t) { return kTokens - 1; };
    const auto prefix = [](int32_t) { return kPrefix - 1; };
    const auto prefix_lm = [](int32_t row) { return std::max(row, kPrefix - 1); };
    const auto state_first = [](int32_t row) { return row == kPrefix ? kPrefix : kTokens - 1; };
    const std::vector<Chunk> chunks = {
        chunk(0, kTokens, whole),         // one bidirectional group
        chunk(0, kTokens, prefix_lm),     // a group, then causal rows
        chunk(kPrefix, kTokens, prefix),  // rows that read the prefix alone, before later pages
        chunk(kPrefix, kTokens, state_first),
        chunk(kTokens - 1, kTokens, [](int32_t) { return 0; }),
    };
    for (const Chunk& part : chunks) {
      SCOPED_TRACE(testing::Message() << "rows " << part.begin << " to " << part.end);
      const HostTensor rows = q.Rows(part.begin, part.end);
      const HostTensor out = Attend(rig, c, cache.storage(), {part}, rows, kStrided);
      CheckAttention(c, part, kv.kv, rows, out);
      // Each row alone, and on several threads, has the same bits.
      const Chunk last{&sequence, part.end - 1, part.end, {part.limits.back()}};
      EXPECT_TRUE(SameBits(Attend(rig, c, cache.storage(), {last}, q.Rows(last.begin, last.end)),
                           out.Rows(out.dims[0] - 1, out.dims[0])));
    }
    // Later pages leave the bits of a row that only reads the prefix alone.
    PagedSequence shorter = sequence;
    shorter.pages.resize(4);
    ASSERT_EQ(shorter.tokens(), kPrefix);
    const HostTensor one = q.Rows(kPrefix - 1, kPrefix);
    EXPECT_TRUE(
        SameBits(Attend(rig, c, cache.storage(), {chunk(kPrefix - 1, kPrefix, prefix)}, one),
                 Attend(rig, c, cache.storage(), {{&shorter, kPrefix - 1, kPrefix}}, one)));
    const Chunk among{&sequence, kTokens - 1, kTokens, {kPrefix - 1}};
    EXPECT_TRUE(SameBits(Attend(rig, c, cache.storage(), {among}, one),
                         Attend(rig, c, cache.storage(), {{&shorter, kPrefix - 1, kPrefix}}, one)));
  }
}

TEST_P(PagedAttentionTest, LargeScoresDoNotOverflow) {
  const HeadCase c{2, 1, 64, kF32};
  Rig rig(GetParam());
  Cache cache(rig, c);
  BlockShuffle blocks(kBlocks, 7);
  const PagedSequence sequence = blocks.Sequence({1, 16, 7});
  cache.Write(kLayer, {&sequence, 0, 24}, MakeKv(c, 24, 1));
  const HostTensor q = Random(c.dtype, {3, c.q_width()}, 2, 1000.0);
  const Chunk chunk{&sequence, 21, 24};
  const HostTensor out = Attend(rig, c, cache.storage(), {chunk}, q);
  for (double value : out.values) EXPECT_TRUE(std::isfinite(value));
}

TEST_P(PagedAttentionTest, PlaceInMemoryAndOtherSequencesDoNotChangeBits) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    const KvRows kv = MakeKv(c, 316, 1);
    const KvRows other_kv = MakeKv(c, 61, 2);
    const HostTensor q = Random(c.dtype, {316, c.q_width()}, 3);
    const HostTensor other_q = Random(c.dtype, {61, c.q_width()}, 4);
    HostTensor expected;
    // Threads, and how the blocks lie in memory.
    for (const auto& [threads, shuffle] :
         std::vector<std::pair<int, uint32_t>>{{1, 1}, {2, 2}, {3, 3}}) {
      SCOPED_TRACE(testing::Message() << threads << " threads, shuffle " << shuffle);
      Rig rig(GetParam(), threads);
      Cache cache(rig, c);
      BlockShuffle blocks(kBlocks, shuffle);
      const PagedSequence sequence = blocks.Sequence(PageLengths()[4]);
      const PagedSequence other = blocks.Sequence(PageLengths()[1]);
      cache.Write(kLayer, {&sequence, 0, 316}, kv);
      cache.Write(kLayer, {&other, 0, 61}, other_kv);
      const HostTensor all = Attend(rig, c, cache.storage(), {{&sequence, 0, 316}}, q);
      if (expected.values.empty()) expected = all;
      EXPECT_TRUE(SameBits(all, expected));
      for (const auto& [begin, end] : std::vector<std::pair<int32_t, int32_t>>{
               {0, 1}, {0, 17}, {315, 316}, {100, 131}, {290, 316}, {63, 65}}) {
        SCOPED_TRACE(testing::Message() << "rows " << begin << " to " << end);
        // Alone, and between rows of another sequence.
        const Chunk chunk{&sequence, begin, end};
        const HostTensor part = q.Rows(begin, end);
        EXPECT_TRUE(
            SameBits(Attend(rig, c, cache.storage(), {chunk}, part), expected.Rows(begin, end)));
        const HostTensor mixed =
            Attend(rig, c, cache.storage(), {{&other, 3, 61}, chunk, {&other, 60, 61}},
                   Stack({other_q.Rows(3, 61), part, other_q.Rows(60, 61)}), kStrided);
        EXPECT_TRUE(SameBits(mixed.Rows(58, 58 + end - begin), expected.Rows(begin, end)));
      }
    }
  }
}

TEST_P(PagedAttentionTest, NanStaysInItsRowAndItsSequence) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    Rig rig(GetParam());
    Cache cache(rig, c);
    BlockShuffle blocks(kBlocks, 7);
    const PagedSequence clean = blocks.Sequence({1, 16, 16, 9});
    const PagedSequence sick = blocks.Sequence({16, 5});
    cache.Write(kLayer, {&clean, 0, 42}, MakeKv(c, 42, 1));
    KvRows sick_kv = MakeKv(c, 21, 2);
    for (int64_t i = 0; i < kPatterns; ++i) sick_kv.choice.at(3, i) = kNan;
    cache.Write(kLayer, {&sick, 0, 21}, sick_kv);
    const HostTensor q = Random(c.dtype, {42, c.q_width()}, 3);
    const HostTensor expected = Attend(rig, c, cache.storage(), {{&clean, 0, 42}}, q);

    HostTensor mixed_q = Stack({Random(c.dtype, {21, c.q_width()}, 4), q});
    for (int64_t i = 0; i < c.q_width(); ++i) mixed_q.at(21 + 30, i) = kNan;
    const HostTensor mixed =
        Attend(rig, c, cache.storage(), {{&sick, 0, 21}, {&clean, 0, 42}}, mixed_q);
    EXPECT_TRUE(SameBits(mixed.Rows(21, 51), expected.Rows(0, 30)));
    EXPECT_TRUE(SameBits(mixed.Rows(52, 63), expected.Rows(31, 42)));
    for (int64_t i = 0; i < c.q_width(); ++i) {
      EXPECT_TRUE(std::isnan(mixed.at(51, i)));
      EXPECT_TRUE(std::isfinite(mixed.at(2, i))) << "token 3 is not visible to row 2";
      EXPECT_TRUE(std::isnan(mixed.at(3, i)));
      EXPECT_TRUE(std::isnan(mixed.at(20, i)));
    }
  }
}

TEST_P(PagedAttentionTest, RefusesWhatDoesNotFit) {
  const HeadCase c{4, 2, 8, kF32};
  Rig rig(GetParam());
  Cache cache(rig, c);
  BlockShuffle blocks(kBlocks, 7);
  const PagedSequence sequence = blocks.Sequence({2});
  cache.Write(kLayer, {&sequence, 0, 2}, MakeKv(c, 2, 1));
  PagedAttentionArgs good;
  good.q = rig.In(Random(kF32, {2, c.q_width()}, 1));
  good.out = rig.Out(kF32, {2, c.q_width()});
  good.kv = &cache.storage();
  good.layer = kLayer;
  good.q_heads = c.q_heads;
  good.scale = c.scale();
  good.batch = MakeBatch(rig, {{&sequence, 0, 2}});
  const auto refused = [&](auto change) {
    PagedAttentionArgs args = good;
    change(args);
    return rig.ops().PagedAttention(rig.stream(), args).code() ==
           absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([&](auto& a) { a.kv = nullptr; }));
  EXPECT_TRUE(refused([&](auto& a) { a.layer = kLayers; }));
  EXPECT_TRUE(refused([&](auto& a) { a.q_heads = 3; }));
  EXPECT_TRUE(refused([&](auto& a) { a.q_heads = 8; }));
  EXPECT_TRUE(refused([&](auto& a) { a.q_heads = 0; }));
  EXPECT_TRUE(refused([&](auto& a) { a.q = rig.In(Random(kF32, {3, c.q_width()}, 1)); }));
  EXPECT_TRUE(refused([&](auto& a) { a.out = rig.Out(kBf16, {2, c.q_width()}); }));
  EXPECT_TRUE(refused([&](auto& a) { a.batch.num_rows = 3; }));
  EXPECT_TRUE(refused([&](auto& a) { a.batch.num_pages = 2; }));
  EXPECT_TRUE(refused([&](auto& a) { a.batch.num_seqs = -1; }));
  EXPECT_TRUE(refused([&](auto& a) { a.batch.pages = rig.In(Random(kF32, {1}, 1)); }));
  EXPECT_TRUE(rig.ops().PagedAttention(rig.stream(), good).ok());
  Must(rig.stream().Synchronize());
}

TEST_P(PagedAttentionTest, StorageGeometryIsChecked) {
  Rig rig(GetParam());
  const KvGeometry good{
      .layers = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = 16, .dtype = kF32};
  EXPECT_TRUE(rig.backend().NewKvStorage(good, 4).ok());
  const auto refused = [&](auto change, uint32_t blocks = 4) {
    KvGeometry geometry = good;
    change(geometry);
    return rig.backend().NewKvStorage(geometry, blocks).status().code() ==
           absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](auto& g) { g.layers = 0; }));
  EXPECT_TRUE(refused([](auto& g) { g.kv_heads = 0; }));
  EXPECT_TRUE(refused([](auto& g) { g.head_dim = 0; }));
  EXPECT_TRUE(refused([](auto& g) { g.block_tokens = 0; }));
  EXPECT_TRUE(refused([](auto& g) { g.block_tokens = 7; }));
  EXPECT_TRUE(refused([](auto& g) { g.dtype = DType::kI32; }));
  EXPECT_TRUE(refused([](auto&) {}, 0));
}

// ---- projection, RoPE, append
// --------------------------------------------------------------------------------------

struct QkvRun {
  HostTensor q;
  HostTensor attention;
};

// Projects, appends and attends one batch.
QkvRun Project(Rig& rig, const HeadCase& c, Cache& cache, const PackedWeight& weight,
               const std::vector<Chunk>& chunks, const HostTensor& x, Layout layout = kDense) {
  const PagedBatch batch = MakeBatch(rig, chunks);
  const DeviceTensor& q = rig.Out(c.dtype, {x.dims[0], c.q_width()}, layout);
  QkvRopeAppendArgs append;
  append.weight = &weight;
  append.x = rig.In(x, layout);
  append.q = q;
  append.kv = &cache.storage();
  append.layer = kLayer;
  append.q_heads = c.q_heads;
  append.batch = batch;
  Must(rig.ops().QkvRopeAppend(rig.stream(), append));
  const DeviceTensor& out = rig.Out(c.dtype, {x.dims[0], c.q_width()});
  PagedAttentionArgs attend;
  attend.q = q;
  attend.out = out;
  attend.kv = &cache.storage();
  attend.layer = kLayer;
  attend.q_heads = c.q_heads;
  attend.scale = c.scale();
  attend.batch = batch;
  Must(rig.ops().PagedAttention(rig.stream(), attend));
  return {rig.Read(q), rig.Read(out)};
}

std::vector<HostTensor> QkvWeights(const HeadCase& c, int64_t hidden) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(hidden));
  return {Random(c.dtype, {c.q_width(), hidden}, 11, scale),
          Random(c.dtype, {c.kv_width(), hidden}, 12, scale),
          Random(c.dtype, {c.kv_width(), hidden}, 13, scale)};
}

constexpr int64_t kHiddens[] = {32, 36, 134};

class QkvRopeAppendTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(QkvRopeAppendTest, MatchesTheOracle) {
  for (const HeadCase& c : HeadCases()) {
    for (int64_t hidden : kHiddens) {
      SCOPED_TRACE(Describe(c) + ", hidden " + std::to_string(hidden));
      Rig rig(GetParam());
      Cache cache(rig, c);
      BlockShuffle blocks(kBlocks, 5);
      const PagedSequence first = blocks.Sequence({1, 16, 9, 16, 3}, 0);
      const PagedSequence second = blocks.Sequence({16, 2}, 300);
      const std::vector<HostTensor> parts = QkvWeights(c, hidden);
      const auto weight = rig.Pack(parts, c.dtype);
      const HostTensor x = Random(c.dtype, {45 + 18, hidden}, 20);
      const QkvRun run =
          Project(rig, c, cache, *weight, {{&first, 0, 45}, {&second, 0, 18}}, x, kStrided);
      const HostTensor stored =
          Stack({cache.Read(kLayer, first, 45), cache.Read(kLayer, second, 18)});

      const auto dim = static_cast<int64_t>(c.head_dim);
      const int64_t half = dim / 2;
      int failures = 0;
      const auto check = [&](double value, Expected e, const char* what, int64_t row,
                             int64_t column) {
        const auto near = Near(value, e.value, e.tolerance, c.dtype);
        if (!near && ++failures <= 3) {
          ADD_FAILURE() << what << " row " << row << " column " << column << ": " << near.message();
        }
      };
      const auto project = [&](const HostTensor& part, int64_t row, int64_t column) {
        Expected e;
        double magnitude = 0;
        for (int64_t i = 0; i < hidden; ++i) {
          e.value += x.at(row, i) * part.at(column, i);
          magnitude += std::abs(x.at(row, i) * part.at(column, i));
        }
        e.tolerance = SumTolerance(hidden, magnitude);
        return e;
      };
      // Rotated element `column`; the angle is rounded to F32 at every step, as the interface says.
      const auto rotate = [&](const HostTensor& part, int64_t row, int64_t column) {
        const int64_t head = column / dim * dim;
        const int64_t i = column % dim % half;
        const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
        const float frequency =
            1.0f / static_cast<float>(std::pow(10000.0, static_cast<double>(exponent)));
        const int32_t position = row < 45 ? first.Position(static_cast<int32_t>(row))
                                          : second.Position(static_cast<int32_t>(row - 45));
        const double angle = static_cast<double>(static_cast<float>(position) * frequency);
        const Expected low = project(part, row, head + i);
        const Expected high = project(part, row, head + half + i);
        const bool is_low = column % dim < half;
        const double value = is_low ? low.value * std::cos(angle) - high.value * std::sin(angle)
                                    : high.value * std::cos(angle) + low.value * std::sin(angle);
        return Expected{value, low.tolerance + high.tolerance +
                                   4 * kUlpF32 * (std::abs(low.value) + std::abs(high.value))};
      };
      for (int64_t row = 0; row < x.dims[0]; ++row) {
        for (int64_t i = 0; i < c.q_width(); ++i)
          check(run.q.at(row, i), rotate(parts[0], row, i), "q", row, i);
        for (int64_t i = 0; i < c.kv_width(); ++i) {
          check(stored.at(row, i), rotate(parts[1], row, i), "k", row, i);
          check(stored.at(row, c.kv_width() + i), project(parts[2], row, i), "v", row, i);
        }
      }
      EXPECT_EQ(failures, 0);
    }
  }
}

TEST_P(QkvRopeAppendTest, ChunkingBatchingPlaceAndThreadsDoNotChangeBits) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    const int64_t hidden = 36;
    const std::vector<HostTensor> parts = QkvWeights(c, hidden);
    const HostTensor x = Random(c.dtype, {61, hidden}, 20);
    const HostTensor other_x = Random(c.dtype, {25, hidden}, 21);
    QkvRun expected;
    HostTensor expected_kv;
    struct Variant {
      int threads;
      uint32_t shuffle;
      std::vector<int32_t> cuts;  // ends of the chunks
      bool mixed;                 // every chunk shares its batch with a chunk of another sequence
    };
    const std::vector<Variant> variants = {
        {1, 1, {61}, false},     {1, 2, {1, 6, 20, 45, 61}, false}, {1, 3, {61}, true},
        {2, 1, {30, 61}, true},  {3, 4, {16, 17, 33, 61}, true},    {2, 1, {61}, false},
        {1, 5, {60, 61}, false},
    };
    for (const Variant& variant : variants) {
      SCOPED_TRACE(testing::Message() << variant.threads << " threads, " << variant.cuts.size()
                                      << " chunks" << (variant.mixed ? ", mixed" : ""));
      Rig rig(GetParam(), variant.threads);
      Cache cache(rig, c);
      BlockShuffle blocks(kBlocks, variant.shuffle);
      const PagedSequence sequence = blocks.Sequence(PageLengths()[1]);
      const PagedSequence other = blocks.Sequence(PageLengths()[3]);
      const auto weight = rig.Pack(parts, c.dtype);
      std::vector<HostTensor> q;
      std::vector<HostTensor> attention;
      int32_t begin = 0;
      int32_t other_begin = 0;
      for (int32_t end : variant.cuts) {
        std::vector<Chunk> chunks;
        std::vector<HostTensor> rows;
        int64_t before = 0;
        if (variant.mixed) {
          before = 5;
          chunks.push_back({&other, other_begin, other_begin + 5});
          rows.push_back(other_x.Rows(other_begin, other_begin + 5));
          other_begin += 5;
        }
        chunks.push_back({&sequence, begin, end});
        rows.push_back(x.Rows(begin, end));
        const QkvRun run = Project(rig, c, cache, *weight, chunks, Stack(rows));
        q.push_back(run.q.Rows(before, before + end - begin));
        attention.push_back(run.attention.Rows(before, before + end - begin));
        begin = end;
      }
      const QkvRun run{Stack(q), Stack(attention)};
      const HostTensor kv = cache.Read(kLayer, sequence, 61);
      if (expected_kv.values.empty()) {
        expected = run;
        expected_kv = kv;
      }
      EXPECT_TRUE(SameBits(run.q, expected.q));
      EXPECT_TRUE(SameBits(kv, expected_kv));
      EXPECT_TRUE(SameBits(run.attention, expected.attention));
    }
  }
}

TEST_P(QkvRopeAppendTest, WithoutACacheProjectsQAlone) {
  for (const HeadCase& c : HeadCasesAndWide()) {
    SCOPED_TRACE(Describe(c));
    const int64_t hidden = 36;
    const auto parts = QkvWeights(c, hidden);
    const HostTensor x = Random(c.dtype, {61, hidden}, 20);
    Rig rig(GetParam());
    Cache cache(rig, c);
    BlockShuffle blocks(kBlocks, 5);
    const PagedSequence sequence = blocks.Sequence(PageLengths()[1]);
    const auto all = rig.Pack(parts, c.dtype);
    const QkvRun fused = Project(rig, c, cache, *all, {{&sequence, 0, 61}}, x);
    const HostTensor before = cache.Read(kLayer, sequence, 61);
    const auto weight = rig.Pack({parts[0]}, c.dtype);
    const DeviceTensor& q = rig.Out(c.dtype, {61, c.q_width()}, kStrided);
    QkvRopeAppendArgs args;
    args.weight = weight.get();
    args.x = rig.In(x, kStrided);
    args.q = q;
    args.q_heads = c.q_heads;
    args.batch.num_rows = 61;
    std::vector<int64_t> positions(61);
    std::iota(positions.begin(), positions.end(), 0);
    args.batch.row_pos = rig.In(Ints(positions));
    Must(rig.ops().QkvRopeAppend(rig.stream(), args));
    EXPECT_TRUE(SameBits(rig.Read(q), fused.q));
    EXPECT_TRUE(SameBits(cache.Read(kLayer, sequence, 61), before));
    const auto refused = [&](auto change) {
      QkvRopeAppendArgs bad = args;
      change(bad);
      return rig.ops().QkvRopeAppend(rig.stream(), bad).code() ==
             absl::StatusCode::kInvalidArgument;
    };
    EXPECT_TRUE(refused([](auto& a) { a.q_heads = 0; }));
    EXPECT_TRUE(refused([&](auto& a) { a.q_heads = static_cast<uint32_t>(c.q_width()); }));
    EXPECT_TRUE(refused([](auto& a) { a.batch.row_pos = {}; }));
    EXPECT_TRUE(refused([](auto& a) { a.batch.num_rows = 60; }));
    Must(rig.stream().Synchronize());
  }
}

TEST_P(QkvRopeAppendTest, WritesOnlyItsOwnSlots) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    Rig rig(GetParam());
    Cache cache(rig, c);
    BlockShuffle blocks(kBlocks, 5);
    const PagedSequence kept = blocks.Sequence({16, 16, 16});
    const KvRows kept_kv = MakeKv(c, 48, 1);
    for (uint32_t layer = 0; layer < kLayers; ++layer) cache.Write(layer, {&kept, 0, 48}, kept_kv);
    const HostTensor before = cache.Read(kLayer, kept, 48);
    // Overwrites token 17 alone, in one layer.
    const KvRows row = MakeKv(c, 1, 2);
    PagedSequence one = kept;
    one.pages = {kept.pages[1]};
    one.pages[0].length = 2;
    cache.Write(kLayer, {&one, 1, 2}, row);
    const HostTensor after = cache.Read(kLayer, kept, 48);
    EXPECT_TRUE(SameBits(after.Rows(0, 17), before.Rows(0, 17)));
    EXPECT_TRUE(SameBits(after.Rows(18, 48), before.Rows(18, 48)));
    HostTensor written = row.kv;
    written.dtype = kF32;
    EXPECT_TRUE(SameBits(after.Rows(17, 18), written));
    EXPECT_TRUE(SameBits(cache.Read(0, kept, 48), before));
  }
}

TEST_P(QkvRopeAppendTest, ANanRowStaysAlone) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    const auto parts = QkvWeights(c, 36);
    HostTensor x = Random(c.dtype, {19, 36}, 20);
    HostTensor q;
    HostTensor kv;
    for (bool sick : {false, true}) {
      Rig rig(GetParam());
      Cache cache(rig, c);
      BlockShuffle blocks(kBlocks, 5);
      const PagedSequence sequence = blocks.Sequence({1, 16, 2});
      const auto weight = rig.Pack(parts, c.dtype);
      if (sick) {
        for (int64_t i = 0; i < 36; ++i) x.at(9, i) = kNan;
      }
      const QkvRun run = Project(rig, c, cache, *weight, {{&sequence, 0, 19}}, x);
      const HostTensor stored = cache.Read(kLayer, sequence, 19);
      if (!sick) {
        q = run.q;
        kv = stored;
        continue;
      }
      EXPECT_TRUE(SameBits(run.q.Rows(0, 9), q.Rows(0, 9)));
      EXPECT_TRUE(SameBits(run.q.Rows(10, 19), q.Rows(10, 19)));
      EXPECT_TRUE(SameBits(stored.Rows(0, 9), kv.Rows(0, 9)));
      EXPECT_TRUE(SameBits(stored.Rows(10, 19), kv.Rows(10, 19)));
      for (double value : stored.Rows(9, 10).values) EXPECT_TRUE(std::isnan(value));
    }
  }
}

TEST_P(QkvRopeAppendTest, RefusesWhatDoesNotFit) {
  const HeadCase c{4, 2, 8, kF32};
  Rig rig(GetParam());
  Cache cache(rig, c);
  BlockShuffle blocks(kBlocks, 7);
  const PagedSequence sequence = blocks.Sequence({2});
  const auto weight = rig.Pack(QkvWeights(c, 32), kF32);
  QkvRopeAppendArgs good;
  good.weight = weight.get();
  good.x = rig.In(Random(kF32, {2, 32}, 1));
  good.q = rig.Out(kF32, {2, c.q_width()});
  good.kv = &cache.storage();
  good.layer = kLayer;
  good.q_heads = c.q_heads;
  good.batch = MakeBatch(rig, {{&sequence, 0, 2}});
  const auto refused = [&](auto change) {
    QkvRopeAppendArgs args = good;
    change(args);
    return rig.ops().QkvRopeAppend(rig.stream(), args).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([&](auto& a) { a.weight = nullptr; }));
  EXPECT_TRUE(refused([&](auto& a) { a.kv = nullptr; }));
  EXPECT_TRUE(refused([&](auto& a) { a.layer = kLayers; }));
  EXPECT_TRUE(refused([&](auto& a) { a.q_heads = 5; }));
  EXPECT_TRUE(refused([&](auto& a) { a.rope_theta = 0; }));
  EXPECT_TRUE(refused([&](auto& a) { a.rope_theta = kNan; }));
  EXPECT_TRUE(refused([&](auto& a) { a.x = rig.In(Random(kF32, {2, 33}, 1)); }));
  EXPECT_TRUE(refused([&](auto& a) { a.x = rig.In(Random(kF32, {3, 32}, 1)); }));
  EXPECT_TRUE(refused([&](auto& a) { a.q = rig.Out(kF32, {2, 31}); }));
  EXPECT_TRUE(refused([&](auto& a) { a.batch.num_rows = 1; }));
  EXPECT_TRUE(rig.ops().QkvRopeAppend(rig.stream(), good).ok());
  Must(rig.stream().Synchronize());
}

// ---- blocks
// --------------------------------------------------------------------------------------------------------

class KvBlocksTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(KvBlocksTest, ReadsBackWhatWasWritten) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    Rig rig(GetParam());
    Cache cache(rig, c);
    BlockShuffle blocks(kBlocks, 5);
    for (const std::vector<int32_t>& lengths : PageLengths()) {
      const PagedSequence sequence = blocks.Sequence(lengths);
      KvRows rows = MakeKv(c, sequence.tokens(), 1);
      cache.Write(kLayer, {&sequence, 0, sequence.tokens()}, rows);
      rows.kv.dtype = kF32;
      EXPECT_TRUE(SameBits(cache.Read(kLayer, sequence, sequence.tokens()), rows.kv));
    }
  }
}

TEST_P(KvBlocksTest, CopiesWholeBlocksOfEveryLayer) {
  for (const HeadCase& c : HeadCases()) {
    SCOPED_TRACE(Describe(c));
    Rig rig(GetParam());
    Cache cache(rig, c);
    BlockShuffle blocks(kBlocks, 5);
    const PagedSequence source = blocks.Sequence({16, 16, 16});
    const PagedSequence target = blocks.Sequence({16, 16, 16});
    const PagedSequence bystander = blocks.Sequence({16, 16, 16});
    std::vector<HostTensor> kept;
    std::vector<HostTensor> copied;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      cache.Write(layer, {&source, 0, 48}, MakeKv(c, 48, layer));
      cache.Write(layer, {&bystander, 0, 48}, MakeKv(c, 48, 10 + layer));
      copied.push_back(cache.Read(layer, source, 48));
      kept.push_back(cache.Read(layer, bystander, 48));
    }
    HostTensor pairs{DType::kI32, {4, 2}, {}};
    for (size_t i = 0; i < 3; ++i) {
      pairs.values.push_back(source.pages[i].block);
      pairs.values.push_back(target.pages[2 - i].block);
    }
    pairs.values.push_back(source.pages[0].block);  // beyond `count`
    pairs.values.push_back(bystander.pages[0].block);
    Must(rig.ops().CopyBlocks(rig.stream(), cache.storage(), rig.In(pairs), 3));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_TRUE(SameBits(cache.Read(layer, source, 48), copied[layer]));
      EXPECT_TRUE(SameBits(cache.Read(layer, bystander, 48), kept[layer]));
      const HostTensor got = cache.Read(layer, target, 48);
      for (int64_t page = 0; page < 3; ++page) {
        EXPECT_TRUE(SameBits(got.Rows(page * 16, page * 16 + 16),
                             copied[layer].Rows((2 - page) * 16, (2 - page) * 16 + 16)));
      }
    }
    EXPECT_EQ(rig.ops().CopyBlocks(rig.stream(), cache.storage(), rig.In(pairs), 5).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(rig.ops().CopyBlocks(rig.stream(), cache.storage(), rig.In(pairs), -1).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(rig.ops().CopyBlocks(rig.stream(), cache.storage(), rig.In(pairs), 0).ok());
    Must(rig.stream().Synchronize());
  }
}

// Slots of a sequence in some order, one token after another.
std::vector<int64_t> SlotsOf(const PagedSequence& sequence, const std::vector<int32_t>& tokens) {
  std::vector<int64_t> slots;
  for (const int32_t token : tokens) slots.push_back(sequence.Slot(token));
  return slots;
}

TEST_P(KvBlocksTest, GathersAndScattersSlots) {
  for (const HeadCase& c : HeadCasesAndWide()) {
    for (const DType dtype : {c.dtype, kF32}) {
      SCOPED_TRACE(Describe(c) + ", rows of " + std::string(DTypeName(dtype)));
      const std::vector<int32_t> tokens = {41, 0, 17, 16, 1, 33, 2, 15};
      const auto count = static_cast<int64_t>(tokens.size());
      const int64_t width = c.kv_width();
      Rig rig(GetParam(), 2);
      Cache cache(rig, c);
      BlockShuffle blocks(kBlocks, 5);
      const PagedSequence source = blocks.Sequence({1, 16, 16, 9});
      const PagedSequence target = blocks.Sequence({16, 16, 16});
      const KvRows kv = MakeKv(c, 42, 1);
      const KvRows target_kv = MakeKv(c, 48, 2);
      cache.Write(kLayer, {&source, 0, 42}, kv);
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        cache.Write(layer, {&target, 0, 48}, target_kv);
      }
      const DeviceTensor& k = rig.Out(dtype, {count, width}, kStrided);
      const DeviceTensor& v = rig.Out(dtype, {count, width});
      Must(rig.ops().GatherKv(rig.stream(), cache.storage(), kLayer,
                              rig.In(Ints(SlotsOf(source, tokens))), k, v));
      const HostTensor keys = rig.Read(k);
      const HostTensor values = rig.Read(v);
      for (int64_t row = 0; row < count; ++row) {
        const int64_t token = tokens[static_cast<size_t>(row)];
        for (int64_t i = 0; i < width; ++i) {
          ASSERT_EQ(keys.at(row, i), kv.kv.at(token, i));
          ASSERT_EQ(values.at(row, i), kv.kv.at(token, width + i));
        }
      }
      // To other slots of the other layer: those alone change.
      const std::vector<int32_t> to = {47, 3, 16, 17, 31, 0, 20, 19};
      Must(rig.ops().ScatterKv(rig.stream(), cache.storage(), 1 - kLayer,
                               rig.In(Ints(SlotsOf(target, to))), k, v));
      HostTensor expected = target_kv.kv;
      expected.dtype = kF32;
      EXPECT_TRUE(SameBits(cache.Read(kLayer, target, 48), expected));
      for (int64_t row = 0; row < count; ++row) {
        for (int64_t i = 0; i < 2 * width; ++i) {
          expected.at(to[static_cast<size_t>(row)], i) =
              kv.kv.at(tokens[static_cast<size_t>(row)], i);
        }
      }
      EXPECT_TRUE(SameBits(cache.Read(1 - kLayer, target, 48), expected));
    }
  }
}

TEST_P(KvBlocksTest, ScatteredRowsAreRoundedAndAttendedLikeAppendedOnes) {
  const HeadCase c{15, 5, 64, kBf16};
  Rig rig(GetParam());
  Cache cache(rig, c);
  BlockShuffle blocks(kBlocks, 5);
  const PagedSequence sequence = blocks.Sequence({1, 16, 5});
  const int64_t width = c.kv_width();
  const HostTensor k = Random(kF32, {22, width}, 1);
  const HostTensor v = Random(kF32, {22, width}, 2);
  std::vector<int32_t> tokens(22);
  std::iota(tokens.begin(), tokens.end(), 0);
  Must(rig.ops().ScatterKv(rig.stream(), cache.storage(), kLayer,
                           rig.In(Ints(SlotsOf(sequence, tokens))), rig.In(k), rig.In(v)));
  HostTensor kv{kF32, {22, 2 * width}, {}};
  for (int64_t row = 0; row < 22; ++row) {
    for (const HostTensor* part : {&k, &v}) {
      for (int64_t i = 0; i < width; ++i) kv.values.push_back(RoundTo(kBf16, part->at(row, i)));
    }
  }
  EXPECT_TRUE(SameBits(cache.Read(kLayer, sequence, 22), kv));
  const Chunk chunk{&sequence, 0, 22};
  const HostTensor q = Random(c.dtype, {22, c.q_width()}, 3);
  CheckAttention(c, chunk, kv, q, Attend(rig, c, cache.storage(), {chunk}, q));
}

TEST_P(KvBlocksTest, SlotsAreChecked) {
  const HeadCase c{4, 2, 8, kBf16};
  Rig rig(GetParam());
  Cache cache(rig, c);
  const TensorView slots = rig.In(Ints({0, 1}));
  const TensorView k = rig.Out(kBf16, {2, c.kv_width()});
  const TensorView v = rig.Out(kBf16, {2, c.kv_width()});
  const TensorView wide = rig.Out(kBf16, {2, c.kv_width() + 1});
  const TensorView short_slots = rig.In(Ints({0}));
  const auto refused = [&](uint32_t layer, const TensorView& at, const TensorView& key,
                           const TensorView& value) {
    const auto code = absl::StatusCode::kInvalidArgument;
    return rig.ops().GatherKv(rig.stream(), cache.storage(), layer, at, key, value).code() ==
               code &&
           rig.ops().ScatterKv(rig.stream(), cache.storage(), layer, at, key, value).code() == code;
  };
  EXPECT_TRUE(refused(kLayers, slots, k, v));
  EXPECT_TRUE(refused(0, short_slots, k, v));
  EXPECT_TRUE(refused(0, k, k, v));
  EXPECT_TRUE(refused(0, slots, wide, v));
  EXPECT_TRUE(refused(0, slots, k, wide));
  EXPECT_TRUE(refused(0, slots, k, v.Rows(0, 1)));
  EXPECT_TRUE(refused(0, slots, rig.Out(DType::kI32, {2, c.kv_width()}), v));
  Must(rig.stream().Synchronize());
  for (const int64_t slot : {int64_t{-1}, int64_t{kBlocks} * PagedSequence::kBlockTokens}) {
    for (const bool gather : {false, true}) {
      const auto stream = Must(rig.backend().NewStream());
      const TensorView at = rig.In(Ints({0, slot}));
      Must(rig.stream().Synchronize());
      Must(gather ? rig.ops().GatherKv(*stream, cache.storage(), 0, at, k, v)
                  : rig.ops().ScatterKv(*stream, cache.storage(), 0, at, k, v));
      EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kInternal);
    }
  }
}

// ---- dense attention
// -----------------------------------------------------------------------------------------------

struct DenseCase {
  uint32_t group_rows;
  uint32_t heads;
  int64_t head_dim;
  DType dtype;
  Layout layout = kDense;
};

const std::vector<DenseCase>& DenseCases() {
  static const std::vector<DenseCase> cases = {
      {1, 1, 8, kF32},
      {5, 2, 12, kF32, kStrided},
      {17, 3, 64, kF32},
      {16, 2, 72, kF32},
      {261, 1, 32, kF32},
      {1, 1, 8, kBf16},
      {5, 2, 12, kBf16, kStrided},
      {17, 3, 64, kBf16},
      {16, 2, 72, kBf16},
      {261, 1, 32, kBf16},
  };
  return cases;
}

std::string Describe(const DenseCase& c) {
  return std::to_string(c.heads) + " heads of " + std::to_string(c.head_dim) + ", groups of " +
         std::to_string(c.group_rows) + " " + std::string(DTypeName(c.dtype));
}

HostTensor RunDense(Rig& rig, const DenseCase& c, const HostTensor& qkv) {
  const DeviceTensor& out = rig.Out(c.dtype, {qkv.dims[0], c.heads * c.head_dim}, c.layout);
  DenseAttentionArgs args;
  args.qkv = rig.In(qkv, c.layout);
  args.out = out;
  args.group_rows = c.group_rows;
  args.heads = c.heads;
  args.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  Must(rig.ops().DenseAttention(rig.stream(), args));
  return rig.Read(out);
}

class DenseAttentionTest : public testing::TestWithParam<BackendFactory> {};

TEST_P(DenseAttentionTest, MatchesTheOracle) {
  for (const DenseCase& c : DenseCases()) {
    SCOPED_TRACE(Describe(c));
    constexpr int64_t kGroups = 3;
    const int64_t width = c.heads * c.head_dim;
    const HostTensor qkv = Random(c.dtype, {kGroups * c.group_rows, 3 * width}, 1);
    Rig rig(GetParam());
    const HostTensor out = RunDense(rig, c, qkv);
    std::vector<int64_t> visible(c.group_rows);
    int failures = 0;
    for (int64_t row = 0; row < qkv.dims[0]; ++row) {
      std::iota(visible.begin(), visible.end(), row / c.group_rows * c.group_rows);
      for (int64_t head = 0; head < c.heads; ++head) {
        std::vector<double> q;
        for (int64_t d = 0; d < c.head_dim; ++d) q.push_back(qkv.at(row, head * c.head_dim + d));
        const auto expected = AttendOracle(
            q, static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.head_dim))), visible,
            [&](int64_t t, int64_t d) { return qkv.at(t, width + head * c.head_dim + d); },
            [&](int64_t t, int64_t d) { return qkv.at(t, 2 * width + head * c.head_dim + d); },
            c.dtype);
        for (int64_t d = 0; d < c.head_dim; ++d) {
          const Expected& e = expected[static_cast<size_t>(d)];
          const auto near = Near(out.at(row, head * c.head_dim + d), e.value, e.tolerance, c.dtype);
          if (!near && ++failures <= 3)
            ADD_FAILURE() << "row " << row << " head " << head << ": " << near.message();
        }
      }
    }
    EXPECT_EQ(failures, 0);
  }
}

TEST_P(DenseAttentionTest, AGroupHasTheSameBitsAloneAndBesideASickOne) {
  for (const DenseCase& c : DenseCases()) {
    SCOPED_TRACE(Describe(c));
    const int64_t rows = c.group_rows;
    HostTensor qkv = Random(c.dtype, {3 * rows, 3 * c.heads * c.head_dim}, 1);
    Rig rig(GetParam());
    const HostTensor all = RunDense(rig, c, qkv);
    EXPECT_TRUE(
        SameBits(RunDense(rig, c, qkv.Rows(2 * rows, 3 * rows)), all.Rows(2 * rows, 3 * rows)));
    for (int threads : {2, 3}) {
      Rig several(GetParam(), threads);
      EXPECT_TRUE(SameBits(RunDense(several, c, qkv), all)) << threads << " threads";
    }
    for (int64_t i = 0; i < qkv.dims[1]; ++i) qkv.at(rows, i) = kNan;  // the first row of group 1
    const HostTensor mixed = RunDense(rig, c, qkv);
    EXPECT_TRUE(SameBits(mixed.Rows(0, rows), all.Rows(0, rows)));
    EXPECT_TRUE(SameBits(mixed.Rows(2 * rows, 3 * rows), all.Rows(2 * rows, 3 * rows)));
    EXPECT_TRUE(std::isnan(mixed.at(2 * rows - 1, 0)));
  }
}

TEST_P(DenseAttentionTest, RefusesWhatDoesNotFit) {
  Rig rig(GetParam());
  DenseAttentionArgs good;
  good.qkv = rig.In(Random(kF32, {6, 48}, 1));
  good.out = rig.Out(kF32, {6, 16});
  good.group_rows = 3;
  good.heads = 2;
  good.scale = 0.5f;
  const auto refused = [&](auto change) {
    DenseAttentionArgs args = good;
    change(args);
    return rig.ops().DenseAttention(rig.stream(), args).code() ==
           absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](auto& a) { a.group_rows = 4; }));
  EXPECT_TRUE(refused([](auto& a) { a.group_rows = 0; }));
  EXPECT_TRUE(refused([](auto& a) { a.heads = 3; }));
  EXPECT_TRUE(refused([](auto& a) { a.heads = 0; }));
  EXPECT_TRUE(refused([&](auto& a) { a.out = rig.Out(kF32, {6, 15}); }));
  EXPECT_TRUE(refused([&](auto& a) { a.out = rig.Out(kF32, {5, 16}); }));
  EXPECT_TRUE(refused([&](auto& a) { a.out = rig.Out(kBf16, {6, 16}); }));
  EXPECT_TRUE(rig.ops().DenseAttention(rig.stream(), good).ok());
  Must(rig.stream().Synchronize());
}

INSTANTIATE_FOR_ALL_BACKENDS(PagedAttentionTest);
INSTANTIATE_FOR_ALL_BACKENDS(QkvRopeAppendTest);
INSTANTIATE_FOR_ALL_BACKENDS(KvBlocksTest);
INSTANTIATE_FOR_ALL_BACKENDS(DenseAttentionTest);

}  // namespace
}  // namespace saccade::optest
