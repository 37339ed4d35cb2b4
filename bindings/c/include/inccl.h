/*
 * INCCL: collectives that are computed in the network, by the switches of a Millstream controller.
 *
 * A process is one rank of a group. The ranks of a group make communicators, and call the same collectives on each, in
 * the same order. The first part are the calls of INCCL as they are known; the second part, whose names end with _v2,
 * has all types, operations and collectives, returns codes, and starts collectives without waiting for them.
 *
 * Any thread may call any function at any time. A pointer that is NULL, or of something that was destroyed, is an error and
 * nothing worse.
 */
#ifndef INCCL_H
#define INCCL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks of a job. */
struct inccl_group;

/* A rank's end of the trees that a group's vectors take. */
struct inccl_communicator;

/*
 * Makes a group: returns when all its ranks, 0 to world_size - 1, have called this. NULL when that fails, as after 30 s in
 * which not all have; inccl_last_error says why. It takes up to 30 s more to connect to a controller that does not answer.
 *
 * controller_ip is where the controller listens: an address or a host name, with the port behind a colon unless that is
 * 52200. With NULL, INCCL_CONTROLLER of the environment has it. The environment also says
 *
 *   INCCL_GROUP             the name of the group: "default" unless it is set
 *   INCCL_BIND              the local address for RDMA: the one that the route to the controller has, unless it is set
 *   INCCL_JOIN_TIMEOUT_MS   how long to wait for the other ranks and for a switch: 30000 unless it is set
 *   INCCL_CALL_TIMEOUT_MS   how long a collective may take: 60000 unless it is set
 *   INCCL_FALLBACK          "off": without a switch, NULL; "on", unless it is set: the ranks' processes take its place
 *   INCCL_KEEP_OVERWRITTEN  "off": no copies of what results overwrite in place, so a switch that dies then is the end
 *   INCCL_REPRODUCIBLE      "1": sums of floats do not depend on which rank comes first
 *   INCCL_JOB               what distinguishes this job from others whose groups have the same name: what the launcher
 *                           calls it (PMIx, Slurm, PBS, LSF, Flux) unless it is set
 *
 * and more: tokens, TLS and ways are in docs/inccl.md.
 *
 * While another job has the name, it is waited for, up to 6 s of the 30.
 */
struct inccl_group *inccl_group_create(int world_size, const char *controller_ip, int rank);

/* Its communicators go on. NULL is nothing. */
void inccl_group_destroy(struct inccl_group *group);

/*
 * Makes a communicator. NULL when that fails. A group can make several, on all ranks in the same order. The first one is
 * there since the group was made, and waits for nobody; each other one when all ranks have called this, as for a group.
 */
struct inccl_communicator *inccl_communicator_create(struct inccl_group *group);

/*
 * Waits up to 1 s for ranks that are not done. What is under way fails with INCCL_ERROR_CANCELED. When this returns, nothing
 * arrives any more. NULL is nothing.
 */
void inccl_communicator_destroy(struct inccl_communicator *comm);

/*
 * The sums of all ranks' vectors, for every rank. len counts elements. src_data and dst_data may be the same. When it
 * fails, it says so in one line on stderr, and dst_data has anything; inccl_last_error and inccl_communicator_error_v2
 * tell programs.
 *
 * The one has the result written to dst_data by RDMA WRITE, the other sent into receive requests. All ranks call the
 * same.
 */
void inccl_allreduce_write(struct inccl_communicator *comm, int32_t *src_data, uint32_t len, int32_t *dst_data);
void inccl_allreduce_sendrecv(struct inccl_communicator *comm, int32_t *src_data, uint32_t len, int32_t *dst_data);

/*
 * Why the last call of this thread that failed did so, and what to do: never NULL, empty when none failed. Valid until
 * the next failure in this thread.
 */
const char *inccl_last_error(void);

/* What the functions below return. */
enum inccl_code {
    INCCL_SUCCESS = 0,
    INCCL_IN_PROGRESS = 1,        /* the collective is not over */
    INCCL_ERROR_ARGUMENT = 2,     /* null, wrong, destroyed, out of range */
    INCCL_ERROR_UNSUPPORTED = 3,  /* there is no such operation on this type */
    INCCL_ERROR_CONTROLLER = 4,   /* the controller is not there, or refuses */
    INCCL_ERROR_TIMEOUT = 5,      /* it took too long */
    INCCL_ERROR_PEER = 6,         /* a rank is lost, late or did not come */
    INCCL_ERROR_SWITCH = 7,       /* a switch is lost, or there is none */
    INCCL_ERROR_MISMATCH = 8,     /* the ranks called different collectives */
    INCCL_ERROR_DEVICE = 9,       /* the RDMA device, or memory that it does not take */
    INCCL_ERROR_PROTOCOL = 10,    /* versions differ, or somebody broke the protocol */
    INCCL_ERROR_BUSY = 11,        /* the name is taken, the memory in use, or too much was started */
    INCCL_ERROR_CANCELED = 12,    /* by inccl_cancel_v2 or inccl_communicator_destroy */
    INCCL_ERROR_INTERNAL = 13     /* a fault of the library */
};

/* What elements are, in the byte order of the machine, at any alignment. */
enum inccl_type {
    INCCL_INT8 = 0,
    INCCL_UINT8 = 1,
    INCCL_INT16 = 2,
    INCCL_UINT16 = 3,
    INCCL_INT32 = 4,
    INCCL_UINT32 = 5,
    INCCL_INT64 = 6,
    INCCL_UINT64 = 7,
    INCCL_FLOAT16 = 8,
    INCCL_BFLOAT16 = 9,
    INCCL_FLOAT32 = 10,
    INCCL_FLOAT64 = 11
};

/* How they are combined. Integers wrap; the last three are for integers. */
enum inccl_operation {
    INCCL_SUM = 0,
    INCCL_PRODUCT = 1,
    INCCL_MINIMUM = 2,
    INCCL_MAXIMUM = 3,
    INCCL_AVERAGE = 4,
    INCCL_BIT_AND = 5,
    INCCL_BIT_OR = 6,
    INCCL_BIT_XOR = 7
};

/* Which vectors a rank has, of how many elements, of world ranks. */
enum inccl_collective {
    INCCL_ALLREDUCE = 0,     /* source: count; destination: count */
    INCCL_REDUCE = 1,        /* source: count; destination: count at the root, none elsewhere */
    INCCL_BROADCAST = 2,     /* source: count at the root, none elsewhere; destination: count */
    INCCL_BARRIER = 3,       /* none */
    INCCL_REDUCESCATTER = 4, /* source: world x count, part r for rank r; destination: count */
    INCCL_ALLGATHER = 5      /* source: count; destination: world x count, part r of rank r */
};

/* How vectors travel, on all ranks the same. */
enum inccl_mode { INCCL_WRITE = 0, INCCL_SEND = 1 };

/* What inccl_group_create_v2 takes beside the ranks. NULL and 0 stand for what the environment says, as above. */
struct inccl_options {
    size_t size; /* sizeof(struct inccl_options) */
    const char *controller;
    const char *group;
    const char *bind;
    uint32_t join_timeout_ms;
    uint32_t call_timeout_ms;
};

/* Makes a group, as inccl_group_create does. options may be NULL. */
int inccl_group_create_v2(int world_size, int rank, const struct inccl_options *options, struct inccl_group **group);

/* Makes a communicator, as inccl_communicator_create does. */
int inccl_communicator_create_v2(struct inccl_group *group, struct inccl_communicator **comm);

/* 0, or why the communicator is of no more use. Waits for nothing. */
int inccl_communicator_error_v2(struct inccl_communicator *comm);

/*
 * These return when the collective is over, for good or bad. Source and destination can be the same memory, where they
 * have one length; of the other two collectives the shorter one can be this rank's part of the longer one.
 */
int inccl_allreduce_v2(struct inccl_communicator *comm, const void *source, void *destination, size_t count, int type,
                       int operation);
int inccl_reduce_v2(struct inccl_communicator *comm, const void *source, void *destination, size_t count, int type,
                    int operation, int root);
int inccl_broadcast_v2(struct inccl_communicator *comm, const void *source, void *destination, size_t count, int type,
                       int root);
int inccl_barrier_v2(struct inccl_communicator *comm);
int inccl_reducescatter_v2(struct inccl_communicator *comm, const void *source, void *destination, size_t count,
                           int type, int operation);
int inccl_allgather_v2(struct inccl_communicator *comm, const void *source, void *destination, size_t count, int type);

/* Any collective. What it does not need is not looked at. */
struct inccl_call {
    int collective;
    int type;
    int operation;
    int root;
    int mode;
    size_t count;
    const void *source;
    void *destination;
};

/* A collective that was started; 0 is none. */
typedef uint64_t inccl_handle_t;

/*
 * Starts a collective and returns at once. Up to 64 can be under way; they end in the order in which they were
 * started, and none may use what an earlier one writes before that one has ended. The vectors are the library's until inccl_test_v2 or inccl_wait_v2 has returned something else than
 * INCCL_IN_PROGRESS, which also ends the handle.
 */
int inccl_start_v2(struct inccl_communicator *comm, const struct inccl_call *call, inccl_handle_t *handle);

/* How the collective has ended, or INCCL_IN_PROGRESS. */
int inccl_test_v2(inccl_handle_t handle);

/* As above, after timeout_ms at most. INCCL_IN_PROGRESS changes nothing. */
int inccl_wait_v2(inccl_handle_t handle, uint64_t timeout_ms);

/*
 * Ends a collective with INCCL_ERROR_CANCELED, unless it is over, and with it the communicator: the other ranks get
 * INCCL_ERROR_PEER. The handle is still to be waited for.
 */
int inccl_cancel_v2(inccl_handle_t handle);

/*
 * Registers memory with a communicator: collectives whose vectors lie in it, wherever, register nothing. The switch can write to
 * it until it is deregistered or the communicator is destroyed; it must stay allocated until then.
 */
int inccl_register_v2(struct inccl_communicator *comm, void *address, size_t bytes);
int inccl_deregister_v2(struct inccl_communicator *comm, void *address);

#ifdef __cplusplus
}
#endif

#endif
