// A batch from real text: the bytes of documents through the front half of a Gated DeltaNet layer
// with fixed random weights, so that keys repeat, correlate and decay as text makes them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check/batch.h"

namespace gdn::cli {

struct TextSpec {
  std::vector<std::string> documents;  // bytes; a token is a byte
  int64_t model_dim = 256;             // width of the embedding
  BatchSpec batch;  // heads, dims, dtypes, options, seed, what is optional; not its recipes
};

// Files as documents, or with `split` their parts between blank lines; together at most max_tokens
// bytes (0: all), the last one cut. Empty parts are left out, empty files are documents of 0
// tokens. `left_out` counts the files that are cut or not used at all.
Result<std::vector<std::string>> read_documents(const std::vector<std::string>& paths, bool split,
                                                int64_t max_tokens, int64_t* left_out = nullptr);

// Of the tables that make_text_batch keeps beside the batch: a projected row for each byte.
double text_tables_bytes(const TextSpec& spec);

// x = E[byte] in R^model_dim;  q, k, v = silu(conv4(W x)), causal within the document; q and k
// L2-normalised unless the options leave that to the kernel;  g = -exp(A_log) softplus(W_a x +
// dt_bias), beta = sigmoid(W_b x), or W_a x and W_b x raw where the options say so;  do random.
// progress(tokens) is called as work is done, from several threads.
Result<Batch> make_text_batch(const TextSpec& spec,
                              const std::function<void(int64_t tokens)>& progress = {});

}  // namespace gdn::cli
