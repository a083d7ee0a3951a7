/* The library for other languages: a C ABI over DLPack tensors (dlpack/dlpack.h).
 *
 * Tensors are borrowed for the duration of a call. Functions return a gdn_status; the message of
 * the calling thread's last error is gdn_last_error(). Handles are not tied to a thread, but one
 * communicator serves one rank's thread at a time. Shapes, dtypes and rules: gdn/problem.h. */
#ifndef GDN_GDN_C_H_
#define GDN_GDN_C_H_

#include <dlpack/dlpack.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gdn_status {
  GDN_OK = 0,
  GDN_INVALID_ARGUMENT = 1,
  GDN_UNSUPPORTED = 2,
  GDN_WORKSPACE_TOO_SMALL = 3,
  GDN_PEER_FAILED = 4,
  GDN_DEVICE = 5,
  GDN_IO = 6,
  GDN_INTERNAL = 7
} gdn_status;

const char* gdn_version(void);
/* Message of this thread's last failed call, valid until its next call; "" if there was none. */
const char* gdn_last_error(void);

/* ---- Partition (gdn/partition.h) ---------------------------------------------------------- */
typedef struct gdn_partition gdn_partition;
typedef struct gdn_fragment {
  int64_t doc, offset, length;
} gdn_fragment;

/* cu_seqlens: [documents + 1]. layout: "contiguous", "zigzag" or "zigzag_per_document". */
gdn_status gdn_partition_create(const int64_t* cu_seqlens, int64_t documents, int world_size,
                                const char* layout, gdn_partition** out);
/* fragments: those of rank 0, then of rank 1, ...; fragment_counts: [world_size]. */
gdn_status gdn_partition_create_explicit(const int64_t* cu_seqlens, int64_t documents,
                                         int world_size, const gdn_fragment* fragments,
                                         const int64_t* fragment_counts, gdn_partition** out);
void gdn_partition_destroy(gdn_partition* partition);
int64_t gdn_partition_fragments(const gdn_partition* partition, int rank); /* how many */
gdn_status gdn_partition_get_fragments(const gdn_partition* partition, int rank,
                                       gdn_fragment* out);
int64_t gdn_partition_local_tokens(const gdn_partition* partition, int rank);
/* out: [local_tokens], the global row of every local row. */
gdn_status gdn_partition_token_indices(const gdn_partition* partition, int rank, int64_t* out);

/* ---- Communicators (gdn/communicator.h) ---------------------------------------------------- */
typedef struct gdn_communicator gdn_communicator;

gdn_status gdn_communicator_create_single(gdn_communicator** out);
/* out: [world_size], one for each rank's thread. */
gdn_status gdn_communicator_create_threads(int world_size, int64_t timeout_ms,
                                           gdn_communicator** out);
void gdn_communicator_destroy(gdn_communicator* communicator);

/* ---- Calls (gdn/gdn.h) ---------------------------------------------------------------------- */
typedef struct gdn_problem {
  int64_t tokens, heads_qk, heads_v, dim_k, dim_v;
  DLDataType operand; /* of q, k, v */
  DLDevice device;
  double scale; /* 0: dim_k^-0.5 */
  int qk_l2norm, gate_in_kernel, beta_sigmoid, allow_neg_eigval; /* the last only with beta_sigmoid */
  /* Capacity for gdn_context_refill: rows and fragments of any rank. 0 and 0: one packing alone. */
  int64_t max_tokens, max_fragments;
  int keep_prepared; /* a saved set keeps what `prepare` made, for a backward without that stage */
} gdn_problem;

/* Optional tensors may be NULL. */
typedef struct gdn_operands {
  const DLTensor *q, *k, *v, *g, *beta;
  const DLTensor *A_log, *dt_bias;
} gdn_operands;

typedef struct gdn_gradients {
  DLTensor *dq, *dk, *dv, *dg, *dbeta;
  DLTensor *dA_log, *ddt_bias;
  DLTensor* dinitial_state;
} gdn_gradients;

typedef struct gdn_context gdn_context;

/* backend: a name, or NULL for the first that takes the problem. tile: 0, or the tile of the
 * W-independent mode. The partition and the communicator outlive the context. */
gdn_status gdn_context_create(const gdn_partition* partition, gdn_communicator* communicator,
                              const gdn_problem* problem, const char* backend, int64_t tile,
                              gdn_context** out);
void gdn_context_destroy(gdn_context* context);
const char* gdn_context_backend(const gdn_context* context);
int64_t gdn_context_resident_bytes(const gdn_context* context);
gdn_status gdn_context_upload(gdn_context* context, void* resident, int64_t bytes, void* stream);
/* Another packing within the capacity, ordered on the stream; byte counts and addresses stay, so
 * that a captured CUDA graph serves it. A collective. States have gdn_context_documents rows. */
gdn_status gdn_context_refill(gdn_context* context, const gdn_partition* partition, void* stream);
int64_t gdn_context_documents(const gdn_context* context);
int64_t gdn_context_forward_workspace_bytes(const gdn_context* context);
int64_t gdn_context_backward_workspace_bytes(const gdn_context* context, int have_saved);
int64_t gdn_context_saved_bytes(const gdn_context* context);

/* saved: saved_bytes, or NULL where no backward follows (or it should recompute). */
gdn_status gdn_forward(const gdn_context* context, const gdn_operands* in,
                       const DLTensor* initial_state, DLTensor* o, DLTensor* final_state,
                       void* workspace, int64_t workspace_bytes, void* saved, int64_t saved_bytes,
                       void* stream);
gdn_status gdn_backward(const gdn_context* context, const gdn_operands* in,
                        const DLTensor* initial_state, const DLTensor* d_o,
                        const DLTensor* dfinal_state, const gdn_gradients* out, void* workspace,
                        int64_t workspace_bytes, const void* saved, int64_t saved_bytes,
                        void* stream);

#ifdef __cplusplus
}
#endif

#endif /* GDN_GDN_C_H_ */
