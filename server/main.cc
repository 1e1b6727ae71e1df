// saccade-server: one binary, a few commands. Exit codes: 0 good, 1 it failed, 2 wrong usage or
// configuration.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>

#include "base/logging.h"
#include "base/strings.h"
#include "cmd_bench.h"
#include "cmd_inspect.h"
#include "cmd_serve.h"
#include "cmd_verify.h"
#include "stop_signals.h"

namespace {

using saccade::BackendConfig;
using saccade::BackendKind;
using saccade::ComputeType;
using saccade::IsaLevel;

// Options that verify, inspect and bench share: which backend runs the checkpoint.
struct BackendFlags {
  std::string kind = "cpu";
  std::string isa = "auto";
  uint32_t threads = 0;

  void AddTo(CLI::App& app) {
    app.add_option("--backend", kind,
                   "cpu, ref, or ref-guarded (device memory unreadable from the host)")
        ->check(CLI::IsMember({"cpu", "ref", "ref-guarded"}))
        ->capture_default_str();
    app.add_option("--isa", isa, "instruction set of the cpu backend")
        ->check(CLI::IsMember({"auto", "avx2", "avx512", "avx512_bf16", "amx_bf16"}))
        ->capture_default_str();
    app.add_option("--threads", threads, "computing threads; 0: usable cores")
        ->check(CLI::Range(0, 1024));
  }
  BackendConfig Config() const {
    BackendConfig config;
    config.name = kind;
    config.kind = kind == "cpu" ? BackendKind::kCpu : BackendKind::kRef;
    config.guarded = kind == "ref-guarded";
    config.threads = threads;
    for (IsaLevel level : {IsaLevel::kAuto, IsaLevel::kAvx2, IsaLevel::kAvx512,
                           IsaLevel::kAvx512Bf16, IsaLevel::kAmxBf16}) {
      if (isa == saccade::Name(level)) config.isa = level;
    }
    return config;
  }
};

int Main(int argc, char** argv, const saccade::StopSignals& signals) {
  CLI::App app{"Saccade: an inference server for vision-language-action models"};
  app.set_version_flag("--version", std::string("saccade-server ") + SACCADE_VERSION);
  app.require_subcommand(1);
  std::function<int()> command;

  std::string config_path = "config/server.yaml";
  CLI::App* serve = app.add_subcommand("serve", "serve the configured models until SIGTERM");
  serve->add_option("--config", config_path, "configuration file")->capture_default_str();
  serve->callback(
      [&] { command = [&] { return saccade::RunServe(config_path, SACCADE_VERSION, signals); }; });

  CLI::App* check =
      app.add_subcommand("check-config", "check a configuration and print it in full");
  check->add_option("--config,config", config_path, "configuration file")->capture_default_str();
  check->callback([&] { command = [&] { return saccade::RunCheckConfig(config_path); }; });

  std::string health_address = "127.0.0.1:50051";
  CLI::App* health = app.add_subcommand("health", "exit 0 when the server at an address is ready");
  health->add_option("--address", health_address, "host:port")->capture_default_str();
  saccade::ProbeTls health_tls;
  CLI::Option* health_ca =
      health->add_option("--tls-ca", health_tls.ca, "PEM of what signed the server's certificate");
  CLI::Option* health_cert = health->add_option("--tls-cert", health_tls.certificate,
                                                "PEM certificate, for a server that asks for one");
  CLI::Option* health_key = health->add_option("--tls-key", health_tls.key, "its PEM private key");
  health_cert->needs(health_ca, health_key);
  health_key->needs(health_cert);
  health
      ->add_option("--tls-name", health_tls.server_name,
                   "name in the server's certificate, when it is not the address's")
      ->needs(health_ca);
  health->callback(
      [&] { command = [&] { return saccade::RunHealth(health_address, health_tls); }; });

  saccade::InspectOptions inspect_options;
  CLI::App* inspect =
      app.add_subcommand("inspect", "what a checkpoint folder holds, needs and lacks");
  inspect->add_option("dir", inspect_options.model_dir, "checkpoint folder")->required();
  inspect->add_flag("--json", inspect_options.json, "print JSON");
  inspect->callback([&] { command = [&] { return saccade::RunInspect(inspect_options); }; });

  saccade::VerifyOptions verify_options;
  BackendFlags verify_backend;
  std::string verify_dtype = "both";
  CLI::App* verify =
      app.add_subcommand("verify", "compare a checkpoint's stage tensors with recorded ones");
  verify->add_option("--model", verify_options.model_dir, "checkpoint folder")->required();
  verify->add_option("--golden", verify_options.golden_path, "golden.safetensors or golden.json")
      ->required();
  verify->add_option("--dtype", verify_dtype, "precision to run")
      ->check(CLI::IsMember({"f32", "bf16", "both"}))
      ->capture_default_str();
  verify_backend.AddTo(*verify);
  verify->callback([&] {
    verify_options.backend = verify_backend.Config();
    verify_options.f32 = verify_dtype != "bf16";
    verify_options.bf16 = verify_dtype != "f32";
    command = [&] { return saccade::RunVerify(verify_options); };
  });

  saccade::BenchOptions bench_options;
  BackendFlags bench_backend;
  std::string bench_dtype = "f32";
  CLI::App* bench = app.add_subcommand("bench", "time the steps of a checkpoint; prints JSON");
  bench->add_option("--model", bench_options.model_dir, "checkpoint folder")->required();
  bench->add_option("--dtype", bench_dtype, "precision to run")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  bench->add_option("--repetitions", bench_options.repetitions, "timed runs of each step")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  bench->add_option("--profile", bench_options.profile,
                    "add the step times to this file, a server's scheduler.cost_file");
  bench_backend.AddTo(*bench);
  bench->callback([&] {
    bench_options.backend = bench_backend.Config();
    bench_options.dtype = bench_dtype == "bf16" ? ComputeType::kBf16 : ComputeType::kF32;
    command = [&] { return saccade::RunBench(bench_options); };
  });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 2;
  }
  // What a command prints is its answer alone; serve sets its own logging up.
  if (const absl::Status logging = saccade::InitLogging({}); !logging.ok()) {
    std::fprintf(stderr, "saccade-server: %s\n",
                 std::string(saccade::FromAbsl(logging.message())).c_str());
    return 1;
  }
  // Only serve stops in an orderly way.
  if (!serve->parsed()) signals.Release();
  return command();
}

}  // namespace

int main(int argc, char** argv) {
  const saccade::StopSignals signals;
  try {
    return Main(argc, argv, signals);
  } catch (const std::exception& error) {  // out of memory, mostly: nothing of ours throws
    std::fprintf(stderr, "saccade-server: %s\n", error.what());
    return 1;
  }
}
