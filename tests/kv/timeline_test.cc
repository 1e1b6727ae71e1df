// Timelines: where blocks are cut, and what makes two keys differ.
#include "kv/timeline.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "tests/kv/kv_testing.h"

namespace saccade {
namespace {

TEST(Timeline, CutsBlocksInsideSegments) {
  const ContentRef frame = Frame(1);
  const auto t = TimelineBuilder(Salt("m"), 16)
                     .AddText(Ids(1, 1))
                     .AddVision(2, frame, 40)
                     .AddText({})
                     .AddVision(0, frame, 0)
                     .AddText(Ids(100, 32))
                     .Build();
  ASSERT_EQ(t->num_tokens(), 73u);
  EXPECT_EQ(t->block_tokens(), 16u);
  ASSERT_EQ(t->segments().size(), 3u);
  EXPECT_EQ(t->segments()[1].modality, Modality::kVision);
  EXPECT_EQ(t->segments()[1].begin, 1u);
  EXPECT_EQ(t->segments()[1].end, 41u);
  EXPECT_EQ(t->segments()[1].camera, 2u);
  EXPECT_EQ(t->segments()[1].content, frame);

  const std::vector<std::array<uint32_t, 3>> expected = {{0, 1, 0},  {1, 16, 1},  {17, 16, 1},
                                                         {33, 8, 1}, {41, 16, 2}, {57, 16, 2}};
  ASSERT_EQ(t->blocks().size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(t->blocks()[i].begin, expected[i][0]) << i;
    EXPECT_EQ(t->blocks()[i].len, expected[i][1]) << i;
    EXPECT_EQ(t->blocks()[i].segment, expected[i][2]) << i;
  }
  EXPECT_EQ(t->tokens()[0], 1);
  EXPECT_EQ(t->tokens()[20], 0);
  EXPECT_EQ(t->tokens()[41], 100);
}

TEST(Timeline, EmptyAndReusedBuilder) {
  TimelineBuilder builder(Salt("m"), 4);
  EXPECT_EQ(builder.Build()->num_tokens(), 0u);
  const auto a = builder.AddText(Ids(1, 5)).Build();
  const auto b = builder.AddText(Ids(1, 5)).Build();
  ASSERT_EQ(a->blocks().size(), 2u);
  ASSERT_EQ(b->blocks().size(), 2u);
  EXPECT_EQ(a->blocks()[1].key, b->blocks()[1].key);
  EXPECT_EQ(TimelineBuilder(Salt("m"), 0).AddText(Ids(1, 3)).Build()->blocks().size(), 3u);
  EXPECT_EQ(TimelineBuilder(Salt("m"), 1u << 20).AddText(Ids(1, 70000)).Build()->blocks().size(),
            2u);
}

TEST(Timeline, KeysChain) {
  const auto a = TimelineBuilder(Salt("m"), 4).AddText(Ids(1, 12)).Build();
  auto ids = Ids(1, 12);
  ids[5] = 999;  // in block 1
  const auto b = TimelineBuilder(Salt("m"), 4).AddText(ids).Build();
  EXPECT_EQ(a->blocks()[0].key, b->blocks()[0].key);
  EXPECT_NE(a->blocks()[1].key, b->blocks()[1].key);
  EXPECT_NE(a->blocks()[2].key, b->blocks()[2].key);
  EXPECT_TRUE(Timeline::SameContent(*a, *b, 0));
  EXPECT_FALSE(Timeline::SameContent(*a, *b, 1));
  EXPECT_TRUE(Timeline::SameContent(*a, *b, 2));  // of the block alone
  EXPECT_FALSE(Timeline::SameContent(*a, *b, 3));
}

// One change each from a base: the first block differs in key and in content.
TEST(Timeline, EveryFieldCounts) {
  const ContentRef frame = Frame(1);
  struct Case {
    const char* what;
    std::shared_ptr<const Timeline> timeline;
  };
  const auto build = [](std::string_view salt) { return TimelineBuilder(Salt(salt), 4); };
  const std::vector<Case> cases = {
      {"base", build("m").AddVision(0, frame, 8).Build()},
      {"salt", build("n").AddVision(0, frame, 8).Build()},
      {"camera", build("m").AddVision(1, frame, 8).Build()},
      {"frame", build("m").AddVision(0, Frame(2), 8).Build()},
      {"tokens of the frame", build("m").AddVision(0, frame, 9).Build()},
      {"length", build("m").AddVision(0, frame, 3).Build()},
      {"modality", build("m").AddText(Ids(0, 4)).Build()},
      {"zeros", build("m").AddText(std::vector<int32_t>(4, 0)).Build()},
      {"text", build("m").AddText(Ids(1, 4)).Build()},
      {"shorter text", build("m").AddText(Ids(1, 3)).Build()},
      {"trailing zero", build("m").AddText(std::vector<int32_t>{1, 2, 3, 0}).Build()},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    for (size_t j = 0; j < cases.size(); ++j) {
      const Timeline& a = *cases[i].timeline;
      const Timeline& b = *cases[j].timeline;
      EXPECT_EQ(a.blocks()[0].key == b.blocks()[0].key, i == j)
          << cases[i].what << " / " << cases[j].what;
      EXPECT_EQ(Timeline::SameContent(a, b, 0), i == j) << cases[i].what << " / " << cases[j].what;
    }
  }
}

// Same content at another position is another block.
TEST(Timeline, PositionCounts) {
  const ContentRef frame = Frame(1);
  const auto a =
      TimelineBuilder(Salt("m"), 4).AddVision(0, frame, 4).AddVision(0, frame, 4).Build();
  EXPECT_NE(a->blocks()[0].key, a->blocks()[1].key);
  // The same tokens cut otherwise.
  const auto b = TimelineBuilder(Salt("m"), 4).AddText(Ids(1, 2)).AddText(Ids(3, 4)).Build();
  const auto c = TimelineBuilder(Salt("m"), 4).AddText(Ids(1, 6)).Build();
  EXPECT_NE(b->blocks()[1].key, c->blocks()[1].key);
  EXPECT_FALSE(Timeline::SameContent(*b, *c, 0));
}

// Fields of a salt are tagged: model "ab" with adapter "" is not model "" with adapter "ab".
TEST(Timeline, SaltFieldsDoNotRunTogether) {
  const auto salt = [](std::string_view a, std::string_view b) {
    return DigestBuilder("salt").Field(a).Field(b).Finish();
  };
  std::set<std::pair<uint64_t, uint64_t>> keys;
  for (const auto& [a, b] : std::vector<std::pair<std::string, std::string>>{
           {"ab", ""}, {"", "ab"}, {"a", "b"}, {"b", "a"}, {"", ""}}) {
    const auto t = TimelineBuilder(salt(a, b), 4).AddText(Ids(1, 4)).Build();
    keys.insert({t->blocks()[0].key.high, t->blocks()[0].key.low});
  }
  EXPECT_EQ(keys.size(), 5u);
  EXPECT_EQ(salt("ab", ""), salt("ab", ""));
}

// A digest of a frame that equals another's changes nothing: frames are compared by identity.
TEST(Timeline, FramesAreComparedByIdentity) {
  const std::shared_ptr<Content> twin = NewFrame(2);
  const ContentRef frame = Frame(1);
  twin->digest = frame->digest;
  const auto a = TimelineBuilder(Salt("m"), 4).AddVision(0, frame, 8).Build();
  const auto b = TimelineBuilder(Salt("m"), 4).AddVision(0, twin, 8).Build();
  EXPECT_EQ(a->blocks()[0].key, b->blocks()[0].key);
  EXPECT_FALSE(Timeline::SameContent(*a, *b, 0));
  EXPECT_TRUE(Timeline::SameContent(*a, *a, 0));
  const auto none = TimelineBuilder(Salt("m"), 4).AddVision(0, nullptr, 8).Build();
  EXPECT_FALSE(Timeline::SameContent(*none, *none, 0));
}

}  // namespace
}  // namespace saccade
