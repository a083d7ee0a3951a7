// gdn make: a batch of operands as a safetensors file, from recipes or from real text.
#include <fmt/format.h>

#include "command.h"
#include "io/batch_file.h"
#include "io/file.h"
#include "memory.h"
#include "options.h"
#include "progress.h"
#include "text_batch.h"

namespace gdn::cli {
namespace {

class Make : public Command {
 public:
  CLI::App* add_to(CLI::App& app) override {
    auto* sub = app.add_subcommand(
        "make",
        "Write operands: q, k [T, H, K], v, do [T, HV, V], g, beta [T, HV], cu_seqlens [N+1]");
    sub->add_option("output", output_, "the safetensors file to write")
        ->option_text("FILE")
        ->required();
    documents_.add_to(*sub);
    auto* text = sub->add_option("--text", files_,
                                 "files whose bytes, one token each, go through a fixed random "
                                 "layer; each file is a document")
                     ->option_text("FILE...")
                     ->excludes("--docs")
                     ->excludes("--workload");
    sub->add_flag("--split", split_, "with --text: parts between blank lines are documents")
        ->needs(text);
    sub->add_option("--max-tokens", max_tokens_, "with --text: stop after so many tokens")
        ->transform(integer(1))
        ->needs(text);
    sub->add_option("--model-dim", model_dim_,
                    "with --text: width of the embedding of a byte [default: 256]")
        ->transform(integer(1))
        ->needs(text);
    recipe_.add_to(*sub);
    for (const char* name : {"--gates", "--keys", "--beta"}) text->excludes(name);
    operator_.add_to(*sub, false);
    sub->footer("Example: gdn make batch.safetensors --docs 300,0,212 --heads 2,6 --seed 1");
    return sub;
  }

  Result<int> run() override {
    GDN_RETURN_IF_ERROR(check_output(output_, files_));
    Result<Batch> batch = files_.empty() ? from_recipe() : from_text();
    if (!batch) return batch.status();
    {
      const Progress progress("writing " + output_);
      GDN_RETURN_IF_ERROR(save_batch(output_, *batch, {{"made_by", "gdn make"}}));
    }
    print_line(fmt::format("{}: {}{}", output_, summary(*batch),
                           batch->d_o.present() ? "" : ", forward only"));
    return kSuccess;
  }

 private:
  Result<Batch> from_recipe() const {
    Result<BatchSpec> spec = documents_.spec();
    if (!spec) {
      return documents_.given()
                 ? spec.status()
                 : Status{ErrorCode::kInvalidArgument,
                          "expected documents: --docs LENGTHS, --workload LETTER or --text FILES"};
    }
    GDN_RETURN_IF_ERROR(recipe_.apply(operator_, *spec));
    GDN_RETURN_IF_ERROR(check_memory(*spec, false));
    const Progress progress("making");
    return make_batch(*spec);
  }

  Result<Batch> from_text() const {
    TextSpec spec;
    int64_t left_out = 0;
    Result<std::vector<std::string>> documents =
        read_documents(files_, split_, max_tokens_, &left_out);
    if (!documents) return documents.status();
    if (left_out > 0) {
      print_note(fmt::format("make: --max-tokens {}: {} of {} files cut or left out", max_tokens_,
                             left_out, files_.size()));
    }
    spec.documents = std::move(*documents);
    spec.model_dim = model_dim_;
    spec.batch.heads_qk = 2;
    spec.batch.heads_v = 6;
    spec.batch.operand = DType::kBFloat16;
    GDN_RETURN_IF_ERROR(recipe_.apply(operator_, spec.batch));
    int64_t tokens = 0;
    for (const std::string& text : spec.documents) {
      spec.batch.documents.push_back(static_cast<int64_t>(text.size()));
      tokens += spec.batch.documents.back();
    }
    GDN_RETURN_IF_ERROR(check_memory(spec.batch, false, text_tables_bytes(spec)));
    Progress progress("reading text", tokens);
    return make_text_batch(spec, [&](int64_t done) { progress.advance(done); });
  }

  std::string output_;
  DocumentOptions documents_;
  RecipeOptions recipe_;
  OperatorOptions operator_;
  std::vector<std::string> files_;
  bool split_ = false;
  int64_t max_tokens_ = 0, model_dim_ = 256;
};

}  // namespace

std::unique_ptr<Command> make_make() { return std::make_unique<Make>(); }

}  // namespace gdn::cli
