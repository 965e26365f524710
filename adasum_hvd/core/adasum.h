/* AdaSum without Horovod and without a framework: in the shared memory of ranks of one host, and over a
 * network of the caller's between hosts.
 *
 * A group is made by one bootstrap, which the caller splits at its two gathers, over any network that it has:
 *
 *   adasum_listen   gives a name and a nonce    the caller gathers both of every rank
 *   adasum_connect  by these                    the caller gathers whether it succeeded
 *
 * If it did not on a rank, all ranks close the group.
 *
 * Functions that return int return ADASUM_OK, or an error that adasum_error describes. A group is for one
 * thread at a time; a process may have any number of groups. Results depend on the tree alone
 * (reduce/tree.h), and so are the bits of Horovod's op. No C++ type and no exception crosses this interface.
 */
#ifndef ADASUM_H
#define ADASUM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ADASUM_ABI 6 /* changes with any struct or function below */

enum {
  ADASUM_OK = 0,
  ADASUM_FAILED = -1,
  ADASUM_UNRESPONSIVE = -2, /* a rank has ended, or is late */
  ADASUM_RULE_FAILED = -3
};
enum { ADASUM_FLOAT16 = 0, ADASUM_FLOAT32 = 1, ADASUM_FLOAT64 = 2, ADASUM_BFLOAT16 = 3 };
enum { ADASUM_GROUP_ADASUM = 0, ADASUM_GROUP_AVERAGE = 1, ADASUM_GROUP_SUM = 2 };

typedef struct adasum_group adasum_group;

typedef struct {
  const void* send;
  int64_t send_bytes;
  void* receive;
  int64_t receive_bytes;
} adasum_message;

/* Messages to ranks on other hosts, which must arrive in order. The functions are called by the thread that
 * calls this interface. They set *done to 1 if they succeed, because an exception of the caller's language
 * may skip a returned value. The buffers belong to an exchange until `wait` has succeeded for it, or `abort`
 * has. */
typedef struct {
  void (*start)(const adasum_message* messages, int* done); /* of one exchange, by rank */
  void (*wait)(int* done);                                  /* for the oldest exchange */
  void (*abort)(int* done); /* all exchanges, after an error; no more follow */
  char problem[256];        /* of the function that failed */
} adasum_network;

/* The same on all ranks, except for `rank` and `network`. */
typedef struct {
  int abi; /* ADASUM_ABI */
  int rank, size;
  const int* hosts;     /* by rank, any number of its host: the tree joins ranks of a host first */
  const int* places;    /* by rank, any number of the place in which ranks can share memory */
  const int* job_ranks; /* by rank, its number in the job, for messages */
  int group_op, group_size;
  double timeout_s;        /* of a wait in which nothing moves */
  const char* limit;       /* what sets this timeout, for messages */
  adasum_network* network; /* between places, as long as the group exists; NULL: there is one place */
} adasum_config;

/* `input` and `output` may be equal, or must not overlap. */
typedef struct {
  const void* input;
  void* output;
  int64_t elements;
  double* observation; /* NULL, or a row of zeros, as reduce/observation.h describes */
} adasum_tensor;

/* Ranks that hold the other shards of some tensors, of which the first `adasum_reduce` is given one. */
typedef struct {
  adasum_group* group; /* of these ranks alone, and for the same thread */
  const int* tensors;  /* their numbers in the call; the same tensors in the same order on these ranks */
  int count;
} adasum_shards;

/* Writes `size` coefficients for each tensor, which its result is the sum of the ranks' vectors times.
 * `grams` has for each tensor the upper triangle of the ranks' dot products, by rows: size (size + 1) / 2
 * numbers, zeros for an empty tensor. Float64 tensors are multiplied by powers of two for that. All ranks
 * call it with the same numbers. Sets *done to 1 if it succeeds. */
typedef void (*adasum_rule)(const double* grams, double* coefficients, int* done);

/* What a reduction does in addition to AdaSum of whole tensors, or instead. The same on all ranks. Then there
 * is one level, and all tensors that are not in shared memory are copied there at once. */
typedef struct {
  const adasum_shards* shards;
  int shards_count;
  adasum_rule rule; /* NULL: AdaSum */
} adasum_extra;

int adasum_abi(void);
const char* adasum_error(void); /* of this thread's last call */

/* Sets *group, which adasum_close frees, also after an error. */
int adasum_listen(const adasum_config* config, adasum_group** group, int* name, int* nonce);
/* By rank. Takes at most 10 s, or half of the timeout. */
int adasum_connect(adasum_group* group, const int* names, const int* nonces);

/* Replaces each tensor's output by AdaSum over the ranks of its input. Collective: the same sizes and dtype
 * on all ranks, and all ranks of the shards' groups, too. Blocks. After an error these groups are of no use,
 * and every later call returns the same error. If only a rule has failed, all ranks return
 * ADASUM_RULE_FAILED, no output has changed, and the group can go on. `extra` may be NULL. */
int adasum_reduce(adasum_group* group, const adasum_tensor* tensors, int count, int dtype,
                  const adasum_extra* extra);

/* Writes every rank's `bytes` bytes to `all`, by rank. Collective: as many on all ranks. Blocks; errors as of
 * adasum_reduce. */
int adasum_gather(adasum_group* group, const void* mine, void* all, int64_t bytes);

/* Writes the number of vectors that AdaSum joins, by level, and returns the number of levels: the form of an
 * observation. `sizes` has room for `most`. */
int adasum_levels(const adasum_group* group, int* sizes, int most);
const char* adasum_describe(const adasum_group* group); /* levels, kernels, threads */

/* Puts memory that the peers can map under `bytes` bytes of a mapping that begin at a page; address and
 * content stay. Returns another address of this memory, by which adasum_reduce reduces it without a copy, or
 * NULL. */
void* adasum_share(void* at, int64_t bytes);
/* Frees the memory, to be called after the mapping `at` is gone. */
void adasum_free(void* other);

void adasum_close(adasum_group* group); /* NULL: nothing */

/* The processors that control groups grant, or infinity. `membership` is /proc/self/cgroup and `mount`
 * /sys/fs/cgroup, or files like these. */
double adasum_quota(const char* membership, const char* mount);

#ifdef __cplusplus
}
#endif
#endif
