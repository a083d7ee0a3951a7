/* The C ABI from C: two ranks' partition, a forward and a backward of one rank, and errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gdn/gdn_c.h"

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      fprintf(stderr, "%s:%d: %s failed: %s\n", __FILE__, __LINE__, #condition,           \
              gdn_last_error());                                                          \
      return 1;                                                                           \
    }                                                                                     \
  } while (0)

enum { T = 150, H = 1, HV = 2, D = 64 };

static DLTensor tensor(float* data, int ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static float q[T * H * D], k[T * H * D], v[T * HV * D], g[T * HV], beta[T * HV], o[T * HV * D];
static float dq[T * H * D], dk[T * H * D], dv[T * HV * D], dg[T * HV], dbeta[T * HV];

static void* block(int64_t bytes) { return aligned_alloc(256, (size_t)(bytes ? bytes : 256)); }

int main(void) {
  const int64_t cu[] = {0, 50, 150};
  gdn_partition* two = NULL;
  CHECK(gdn_partition_create(cu, 2, 2, "zigzag_per_document", &two) == GDN_OK);
  CHECK(gdn_partition_local_tokens(two, 0) + gdn_partition_local_tokens(two, 1) == T);
  gdn_fragment fragments[8];
  CHECK(gdn_partition_fragments(two, 0) == 4);
  CHECK(gdn_partition_get_fragments(two, 0, fragments) == GDN_OK);
  CHECK(fragments[0].doc == 0 && fragments[0].offset == 0 && fragments[0].length == 12);
  CHECK(gdn_partition_local_tokens(two, 2) == -1);
  CHECK(strstr(gdn_last_error(), "rank: expected 0 to 1, got 2") != NULL);
  gdn_partition_destroy(two);

  const int64_t bad[] = {0, 50, 40};
  CHECK(gdn_partition_create(bad, 2, 1, "contiguous", &two) == GDN_INVALID_ARGUMENT);
  CHECK(strstr(gdn_last_error(), "cu_seqlens") != NULL);
  CHECK(gdn_partition_create(cu, 2, 1, "sideways", &two) == GDN_INVALID_ARGUMENT);

  gdn_partition* partition = NULL;
  gdn_communicator* communicator = NULL;
  CHECK(gdn_partition_create(cu, 2, 1, "contiguous", &partition) == GDN_OK);
  CHECK(gdn_communicator_create_single(&communicator) == GDN_OK);
  gdn_problem problem;
  memset(&problem, 0, sizeof problem);
  problem.tokens = T;
  problem.heads_qk = H;
  problem.heads_v = HV;
  problem.dim_k = problem.dim_v = D;
  problem.operand.code = kDLFloat;
  problem.operand.bits = 32;
  problem.operand.lanes = 1;
  problem.device.device_type = kDLCPU;
  problem.qk_l2norm = 1;
  gdn_context* context = NULL;
  CHECK(gdn_context_create(partition, communicator, &problem, "nothing", 0, &context) ==
        GDN_INVALID_ARGUMENT);
  CHECK(gdn_context_create(partition, communicator, &problem, NULL, 0, &context) == GDN_OK);
  printf("backend %s\n", gdn_context_backend(context));

  for (int i = 0; i < T * H * D; ++i) q[i] = sinf(0.7f * (float)i), k[i] = sinf(1.3f * (float)i);
  for (int i = 0; i < T * HV * D; ++i) v[i] = sinf(0.9f * (float)i), o[i] = NAN;
  for (int i = 0; i < T * HV; ++i) g[i] = -0.05f, beta[i] = 0.5f;
  int64_t qk_shape[] = {T, H, D}, v_shape[] = {T, HV, D}, gate_shape[] = {T, HV};
  DLTensor tq = tensor(q, 3, qk_shape), tk = tensor(k, 3, qk_shape), tv = tensor(v, 3, v_shape);
  DLTensor tg = tensor(g, 2, gate_shape), tb = tensor(beta, 2, gate_shape);
  DLTensor to = tensor(o, 3, v_shape);
  gdn_operands in = {&tq, &tk, &tv, &tg, &tb, NULL, NULL};

  const int64_t forward_bytes = gdn_context_forward_workspace_bytes(context);
  const int64_t saved_bytes = gdn_context_saved_bytes(context);
  const int64_t backward_bytes = gdn_context_backward_workspace_bytes(context, 1);
  void *workspace = block(forward_bytes > backward_bytes ? forward_bytes : backward_bytes);
  void* saved = block(saved_bytes);
  CHECK(gdn_forward(context, &in, NULL, &to, NULL, workspace, forward_bytes, saved, saved_bytes,
                    NULL) == GDN_OK);
  DLTensor tdq = tensor(dq, 3, qk_shape), tdk = tensor(dk, 3, qk_shape);
  DLTensor tdv = tensor(dv, 3, v_shape), tdg = tensor(dg, 2, gate_shape);
  DLTensor tdb = tensor(dbeta, 2, gate_shape);
  gdn_gradients out = {&tdq, &tdk, &tdv, &tdg, &tdb, NULL, NULL, NULL};
  CHECK(gdn_backward(context, &in, NULL, &to, NULL, &out, workspace, backward_bytes, saved,
                     saved_bytes, NULL) == GDN_OK);

  /* d(|o|^2 / 2)/dv is linear in v: <dv, v> = |o|^2. */
  double dot = 0, norm = 0;
  for (int i = 0; i < T * HV * D; ++i) dot += (double)dv[i] * v[i], norm += (double)o[i] * o[i];
  CHECK(norm > 0 && fabs(dot / norm - 1) < 1e-5);

  /* A saved set with what `prepare` made: larger, and the same gradients from less memory. */
  gdn_context* keeper = NULL;
  problem.keep_prepared = 1;
  CHECK(gdn_context_create(partition, communicator, &problem, NULL, 0, &keeper) == GDN_OK);
  problem.keep_prepared = 0;
  const int64_t kept_bytes = gdn_context_saved_bytes(keeper);
  const int64_t less_bytes = gdn_context_backward_workspace_bytes(keeper, 1);
  CHECK(kept_bytes > saved_bytes && kept_bytes + less_bytes == saved_bytes + backward_bytes);
  void* kept = block(kept_bytes);
  float first[T * H * D];
  memcpy(first, dk, sizeof first);
  memset(dk, 0, sizeof first);
  CHECK(gdn_forward(keeper, &in, NULL, &to, NULL, workspace, forward_bytes, kept, kept_bytes,
                    NULL) == GDN_OK);
  CHECK(gdn_backward(keeper, &in, NULL, &to, NULL, &out, workspace, less_bytes, kept, kept_bytes,
                     NULL) == GDN_OK);
  CHECK(memcmp(first, dk, sizeof first) == 0);
  gdn_context_destroy(keeper);
  free(kept);

  in.k = NULL;
  CHECK(gdn_forward(context, &in, NULL, &to, NULL, workspace, forward_bytes, NULL, 0, NULL) ==
        GDN_INVALID_ARGUMENT);
  CHECK(strstr(gdn_last_error(), "k: expected a tensor of shape [T=150, H=1, K=64], got none") != NULL);
  in.k = &tk;
  CHECK(gdn_forward(context, &in, NULL, &to, NULL, workspace, 0, NULL, 0, NULL) ==
        GDN_WORKSPACE_TOO_SMALL);

  /* Another packing in a context with room for it: the same bytes as two calls. */
  gdn_context* roomy = NULL;
  problem.max_tokens = T;
  problem.max_fragments = 3;
  CHECK(gdn_context_create(partition, communicator, &problem, NULL, 0, &roomy) == GDN_OK);
  CHECK(gdn_context_documents(roomy) == 3);
  const int64_t roomy_bytes = gdn_context_forward_workspace_bytes(roomy);
  void* room = block(roomy_bytes);
  gdn_partition* other = NULL;
  const int64_t whole[] = {0, 0, T - 1}, many[] = {0, 10, 20, 30, 40};
  CHECK(gdn_partition_create(many, 4, 1, "contiguous", &other) == GDN_OK);
  CHECK(gdn_context_refill(roomy, other, NULL) == GDN_INVALID_ARGUMENT);
  CHECK(strstr(gdn_last_error(), "max_fragments: expected at least 4, the fragments") != NULL);
  CHECK(gdn_context_refill(context, other, NULL) == GDN_INVALID_ARGUMENT);
  gdn_partition_destroy(other);
  CHECK(gdn_partition_create(whole, 2, 1, "contiguous", &other) == GDN_OK);
  CHECK(gdn_context_refill(roomy, other, NULL) == GDN_OK);
  CHECK(gdn_context_forward_workspace_bytes(roomy) == roomy_bytes);
  CHECK(gdn_forward(roomy, &in, NULL, &to, NULL, room, roomy_bytes, NULL, 0, NULL) == GDN_OK);
  CHECK(o[(T - 2) * HV * D] != 0 && o[(T - 1) * HV * D] == 0);
  gdn_partition_destroy(other);
  gdn_context_destroy(roomy);
  free(room);

  free(workspace);
  free(saved);
  gdn_context_destroy(context);
  gdn_communicator_destroy(communicator);
  gdn_partition_destroy(partition);
  printf("1 passed, 0 failed\n");
  return 0;
}
