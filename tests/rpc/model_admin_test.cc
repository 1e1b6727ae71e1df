// Models that come, go and are replaced while another one answers; limits that change for open
// sessions; a budget that says no.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <thread>

#include "base/strings.h"
#include "saccade/v1/admin.grpc.pb.h"
#include "saccade/v1/models.grpc.pb.h"
#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::Open Go(const std::string& model) {
  v1::Open open;
  open.set_model(model);
  open.set_instruction("go");
  return open;
}

// A server whose loads are FakeModels; `fail` makes the next ones fail.
class ModelAdminTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(::testing::TempDir()) / "saccade_models_root";
    std::filesystem::create_directories(root_ / "inside");
    std::filesystem::create_directories(root_.string() + "_outside");
    std::filesystem::remove(root_ / "link");
    std::filesystem::create_directory_symlink(root_.string() + "_outside", root_ / "link");
  }
  void TearDown() override {
    std::filesystem::remove_all(root_);
    std::filesystem::remove_all(root_.string() + "_outside");
  }
  void Start(uint64_t memory = 0) {
    ServerOptions options;
    options.memory = memory;
    options.config = [this](Config& config) {
      config.admin.models_root = root_.string();
      config.server.drain_s = 5;
    };
    options.source = [this](const ModelConfig& config,
                            Backend& backend) -> absl::StatusOr<ServedModel> {
      paths_.push_back(config.path);
      if (fail_) return absl::InvalidArgumentError(failure_);
      FakeModelOptions model;
      model.gate = gate_;
      ASSIGN_OR_RETURN(ServedModel served, ServeFake(backend, config.name, model));
      ASSIGN_OR_RETURN(served.weights,
                       MemoryBudget::Hold(server_->memory(), MemoryKind::kWeights, weights_));
      return served;
    };
    server_ = std::make_unique<TestServer>(std::move(options));
    channel_ = NewChannel(server_->address());
    admin_ = v1::Admin::NewStub(channel_);
  }

  grpc::Status Load(const std::string& name, const std::string& folder = "",
                    const std::string& like = "") {
    v1::LoadModelRequest request;
    request.set_name(name);
    request.set_folder(folder);
    request.set_like(like);
    grpc::ClientContext context;
    v1::LoadModelResponse response;
    const grpc::Status status = admin_->LoadModel(&context, request, &response);
    if (status.ok()) {
      EXPECT_EQ(response.model().name(), name);
    }
    return status;
  }
  grpc::Status Unload(const std::string& name, double grace_s = 5) {
    v1::UnloadModelRequest request;
    request.set_name(name);
    request.set_grace_s(grace_s);
    grpc::ClientContext context;
    v1::UnloadModelResponse response;
    return admin_->UnloadModel(&context, request, &response);
  }
  grpc::Status Reload(const std::string& name, double grace_s = 5) {
    v1::ReloadModelRequest request;
    request.set_name(name);
    request.set_grace_s(grace_s);
    grpc::ClientContext context;
    v1::ReloadModelResponse response;
    return admin_->ReloadModel(&context, request, &response);
  }
  std::vector<std::string> Names() {
    grpc::ClientContext context;
    v1::ListResponse response;
    EXPECT_TRUE(v1::Models::NewStub(channel_)->List(&context, {}, &response).ok());
    std::vector<std::string> names;
    for (const v1::Model& model : response.models()) names.push_back(model.name());
    return names;
  }

  std::filesystem::path root_;
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::atomic<bool> fail_{false};
  std::string failure_ = "a broken checkpoint";
  uint64_t weights_ = 1 << 20;
  std::vector<std::string> paths_;  // of loads; written by one thread at a time
  std::unique_ptr<TestServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

// A message travels as headers, twice, and gRPC ends a call whose headers are too long.
TEST_F(ModelAdminTest, WhyAReloadFailedArrivesHoweverLongItIs) {
  Start(512 << 20);
  fail_ = true;
  failure_ = "there is no tensor; there are: ";
  while (failure_.size() < 100'000) failure_ += "\u00e9\u4e16";
  const grpc::Status status = Reload("fake");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_INVALID_INPUT);
  const std::string& message = status.error_message();
  EXPECT_NE(message.find("there is no tensor"), std::string::npos) << message;
  EXPECT_TRUE(message.ends_with("\u4e16 ...") || message.ends_with("\u00e9 ..."))
      << "cut within a character";
}

TEST_F(ModelAdminTest, OthersAnswerBitEqualWhileModelsComeAndGo) {
  Start(512 << 20);
  SessionClient steady(channel_);
  steady.Open(Go("fake"));
  std::map<int, std::vector<int32_t>> expected;
  uint64_t act = 0;
  for (int shade = 0; shade < 5; ++shade) {
    steady.SendFrame(RawFrame("front", static_cast<uint8_t>(shade)));
    expected[shade] = TokensOf(steady.Act(++act));
    EXPECT_EQ(expected[shade].size(), 3U);
  }
  const uint64_t before = server_->memory()->held();
  std::atomic<bool> stop{false};
  std::thread asking([&] {
    for (int i = 0; !stop; ++i) {
      steady.SendFrame(RawFrame("front", static_cast<uint8_t>(i % 5)));
      EXPECT_EQ(TokensOf(steady.Act(++act)), expected[i % 5]);
    }
  });
  constexpr int kCycles = 50;
  for (int i = 0; i < kCycles; ++i) {
    ASSERT_TRUE(Load("other", "inside", "fake").ok());
    SessionClient session(channel_);
    session.Open(Go("other"));
    session.SendFrame(RawFrame("front", 3));
    EXPECT_EQ(TokensOf(session.Act(1)), expected[3]);  // the same weights
    if (i % 5 == 0) {
      session.HalfClose();
      EXPECT_TRUE(session.Finish().ok());
      ASSERT_TRUE(Reload("other").ok());
    }
    ASSERT_TRUE(Unload("other").ok());
  }
  stop = true;
  asking.join();
  EXPECT_EQ(server_->metrics().klass(ClassId(3)).missed->Value(), 0);
  EXPECT_EQ(server_->metrics().model("other").loads->Value(), 0);
  EXPECT_EQ(server_->metrics().model("fake").loads->Value(), 1);
  EXPECT_THAT(Names(), ElementsAre("fake"));
  EXPECT_TRUE(Eventually([&] {  // frames that the cache keeps may differ
    return server_->memory()->held() - server_->memory()->held(MemoryKind::kFrames) <= before;
  })) << server_->memory()->Sum();
  EXPECT_EQ(server_->memory()->held(MemoryKind::kWeights), 0U);  // the first has none in this test
  steady.HalfClose();
  EXPECT_TRUE(steady.Finish().ok());
  server_->ExpectIdleSoon();
}

TEST_F(ModelAdminTest, UnloadFinishesWhatItHasAndEndsItsSessionsWithAReason) {
  Start();
  ASSERT_TRUE(Load("other", "inside", "fake").ok());
  SessionClient client(channel_);
  client.Open(Go("other"));
  client.SendFrame(RawFrame("front", 1));
  gate_->Close();
  client.SendAct(7);
  gate_->AwaitWaiter();
  std::thread unload([&] { EXPECT_TRUE(Unload("other").ok()); });
  const auto notice = client.Next();
  ASSERT_TRUE(notice && notice->has_notice());
  EXPECT_EQ(notice->notice().kind(), v1::NOTICE_KIND_MODEL_UNLOADING);
  // New sessions of it are refused meanwhile; the other model serves on.
  SessionClient late(channel_);
  v1::SessionRequest open;
  *open.mutable_open() = Go("other");
  late.Send(open);
  EXPECT_FALSE(late.Next());
  EXPECT_EQ(late.Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  gate_->Open();
  EXPECT_EQ(client.NextChunk().act_id(), 7U);
  EXPECT_FALSE(client.Next());
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_MODEL_UNLOADED);
  unload.join();
  EXPECT_EQ(Unload("other").error_code(), grpc::StatusCode::NOT_FOUND);
  server_->ExpectIdleSoon();
}

TEST_F(ModelAdminTest, AfterTheGraceRequestsFailWithAReason) {
  Start();
  ASSERT_TRUE(Load("other", "inside", "fake").ok());
  SessionClient client(channel_);
  client.Open(Go("other"));
  client.SendFrame(RawFrame("front", 1));
  gate_->Close();
  client.SendAct(1);
  gate_->AwaitWaiter();
  std::thread unload([&] { EXPECT_TRUE(Unload("other", 0.05).ok()); });
  ASSERT_TRUE(client.Next());  // the notice
  const v1::RequestError error = client.NextError();
  EXPECT_EQ(error.act_id(), 1U);
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_MODEL_UNLOADED);
  EXPECT_FALSE(client.Next());
  gate_->Open();  // the step itself ends on its own; its memory is free only then
  unload.join();
  server_->ExpectIdleSoon();
}

TEST_F(ModelAdminTest, ReloadSwapsForNewSessionsAndAFailedOneChangesNothing) {
  Start();
  SessionClient old(channel_);
  old.Open(Go("fake"));
  old.SendFrame(RawFrame("front", 2));
  const std::vector<int32_t> tokens = TokensOf(old.Act(1));
  fail_ = true;
  EXPECT_EQ(Reload("fake").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(TokensOf(old.Act(2)), tokens);
  fail_ = false;
  std::thread reload([&] { EXPECT_TRUE(Reload("fake", 30).ok()); });
  const auto notice = old.Next();
  ASSERT_TRUE(notice && notice->has_notice());
  EXPECT_EQ(notice->notice().kind(), v1::NOTICE_KIND_MODEL_REPLACED);
  SessionClient fresh(channel_);
  fresh.Open(Go("fake"));
  fresh.SendFrame(RawFrame("front", 2));
  EXPECT_EQ(TokensOf(fresh.Act(1)), tokens);
  EXPECT_EQ(TokensOf(old.Act(3)), tokens);  // on the old one
  EXPECT_EQ(server_->engine().models().back()->id, ModelId(1));
  old.HalfClose();
  EXPECT_TRUE(old.Finish().ok());
  reload.join();  // well before its grace
  EXPECT_EQ(server_->engine().models().size(), 1U);
  EXPECT_EQ(TokensOf(fresh.Act(2)), tokens);
}

TEST_F(ModelAdminTest, NamesAndFoldersAreBounded) {
  Start();
  for (const char* name : {"", "../x", "a/b", "a b", ".hidden"})
    EXPECT_EQ(Load(name, "inside", "fake").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  for (const char* folder : {"..", "../saccade_models_root_outside", "/etc", "inside/..", "link"}) {
    const grpc::Status status = Load("new", folder, "fake");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << folder;
    EXPECT_EQ(DetailOf(status).field(), "folder");
  }
  EXPECT_EQ(Load("new", "absent", "fake").error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Load("new", "", "fake").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Load("new", "inside", "nobody").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Load("fake").error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_TRUE(paths_.empty());
  EXPECT_EQ(Unload("fake", -1).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(Load("new", "inside", "fake").ok());
  EXPECT_THAT(paths_, ElementsAre(std::filesystem::canonical(root_ / "inside").string()));
  EXPECT_THAT(Names(), ElementsAre("fake", "new"));
}

TEST_F(ModelAdminTest, TheLastModelMayGoAndComeBack) {
  Start();
  ASSERT_TRUE(Unload("fake").ok());
  EXPECT_TRUE(Names().empty());
  EXPECT_FALSE(server_->engine().Ready());
  ASSERT_TRUE(Load("fake").ok());
  EXPECT_TRUE(server_->engine().Ready());
  SessionClient client(channel_);
  client.Open(Go(""));
  client.SendFrame(RawFrame("front", 2));
  EXPECT_EQ(TokensOf(client.Act(1)).size(), 3U);
}

TEST_F(ModelAdminTest, WhatDoesNotFitTheBudgetIsRefusedWithTheSum) {
  Start(256 << 20);
  weights_ = 300ULL << 20;
  const uint64_t before = server_->memory()->held();
  const grpc::Status status = Load("other", "inside", "fake");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_OUT_OF_MEMORY);
  EXPECT_THAT(status.error_message(), HasSubstr("of 256.0 MiB"));
  EXPECT_EQ(server_->memory()->held(), before);
  // Frames that have no room are refused one by one; smaller ones go on, and nothing is left over.
  SessionClient client(channel_);
  client.Open(Go("fake"));
  auto rest = server_->memory()->Hold(
      MemoryKind::kWeights, server_->memory()->limit() - server_->memory()->held() - (2 << 20));
  ASSERT_TRUE(rest.ok());
  client.SendFrame(RawFrame("front", 1, 0, 1000, 1000));  // 3 MB
  const v1::RequestError error = client.NextError();
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_OUT_OF_MEMORY);
  EXPECT_TRUE(error.detail().has_retry_after_us());
  client.SendFrame(RawFrame("front", 1));
  EXPECT_EQ(TokensOf(client.Act(1)).size(), 3U);
  rest->Release();
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
  EXPECT_TRUE(Eventually([&] {
    return server_->memory()->held() - server_->memory()->held(MemoryKind::kFrames) == before;
  })) << server_->memory()->Sum();
}

TEST_F(ModelAdminTest, OpenSessionsFollowChangedLimits) {
  Start();
  SessionClient client(channel_);
  client.Open(Go("fake"));
  client.SendFrame(RawFrame("front", 1));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  const auto set = [&](const v1::LiveLimits& limits) {
    grpc::ClientContext context;
    v1::SetLimitsRequest request;
    *request.mutable_limits() = limits;
    v1::SetLimitsResponse response;
    const grpc::Status status = admin_->SetLimits(&context, request, &response);
    return std::pair(status, response.limits());
  };
  v1::LiveLimits limits;
  limits.set_acts_per_s(0.01);
  limits.set_max_image_bytes(1024);
  limits.set_max_sessions(1);
  limits.add_classes()->set_name("control");
  limits.mutable_classes(0)->set_max_queued(3);
  const auto [status, now] = set(limits);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(now.acts_per_s(), 0.01);
  EXPECT_EQ(now.classes(0).max_queued(), 3U);
  EXPECT_EQ(now.max_samples(), 16U);  // as it was
  client.SendAct(2);                  // the one that is saved up
  EXPECT_EQ(client.NextChunk().act_id(), 2U);
  client.SendAct(3);
  EXPECT_EQ(client.NextError().detail().reason(), v1::ERROR_REASON_RATE_LIMITED);
  client.SendFrame(RawFrame("front", 1, 0, 100, 100));
  EXPECT_EQ(client.NextError().detail().reason(), v1::ERROR_REASON_INVALID_INPUT);
  SessionClient second(channel_);
  EXPECT_FALSE(second.Next());
  EXPECT_EQ(second.Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);

  // All or none, and checked as the configuration is.
  v1::LiveLimits wrong;
  wrong.set_acts_per_s(100);
  wrong.set_max_samples(100'000);
  const auto [refused, nothing] = set(wrong);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("limits.max_samples"));
  wrong.Clear();
  wrong.set_max_message_bytes(1ULL << 30);
  EXPECT_EQ(set(wrong).first.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  wrong.Clear();
  wrong.add_classes()->set_name("nobody");
  EXPECT_EQ(set(wrong).first.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  grpc::ClientContext context;
  v1::GetLimitsResponse response;
  ASSERT_TRUE(admin_->GetLimits(&context, {}, &response).ok());
  EXPECT_EQ(response.limits().acts_per_s(), 0.01);
}

}  // namespace
}  // namespace saccade::testing
