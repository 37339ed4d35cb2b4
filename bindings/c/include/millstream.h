/*
 * What Millstream adds to the C API of transfer_engine_c.h.
 */
#ifndef MILLSTREAM_H
#define MILLSTREAM_H

#include "transfer_engine_c.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Why the last call of this thread that failed did so, and what to do: never NULL, empty when none failed. After
 * getTransferStatus, why the task failed. Valid until the next failure in this thread.
 */
const char *millstream_last_error(void);

/* The version of the library, as "0.1.0". */
const char *millstream_version(void);

/*
 * Waits until all tasks of a batch have ended, for good or bad. 0, or STATUS_TIMEOUT when that takes longer; or the
 * negative of a code. The waiting thread does the work, where no other does.
 */
int millstream_wait_batch(transfer_engine_t engine, batch_id_t batch_id, uint64_t timeout_ms);

/* Begins to end a task; its status says when it has ended, as CANCELED unless it was over before. */
int millstream_cancel_task(transfer_engine_t engine, batch_id_t batch_id, size_t task_id);

/*
 * As createTransferEngine, with `count` settings, each "NAME=VALUE" as docs/reference/configuration.md names them
 * ("security.token_file=/etc/millstream/token"). They come before variables of the environment and the file of
 * MILLSTREAM_CONFIG. NULL when one of them is wrong.
 */
transfer_engine_t millstream_create_engine(const char *metadata_conn_string, const char *local_server_name,
                                           const char *ip_or_host_name, const char *const *settings, size_t count);

/* How soon requests are wanted, where the policy TENT chooses: MC_USE_TENT, or transfer.policy=tent. */
#define MILLSTREAM_PRIORITY_DEFAULT 0 /* as their class says, or normal */
#define MILLSTREAM_PRIORITY_LATENCY 1
#define MILLSTREAM_PRIORITY_NORMAL 2
#define MILLSTREAM_PRIORITY_BULK 3

/* How requests are to be done. All zero but for `size` is as submitTransfer does them. */
typedef struct millstream_submit_options {
    size_t size;          /* sizeof(struct millstream_submit_options) */
    int priority;         /* MILLSTREAM_PRIORITY_... */
    int durable;          /* 1: a WRITE is COMPLETED once its bytes survive a loss of power there; for files; 0: no */
    uint64_t timeout_us;  /* what has not ended then ends as STATUS_TIMEOUT; 0: no limit */
    const char *transport; /* the one that is to do them: "rdma", "tcp", "shm"...; NULL: any */
    const char *policy;    /* their class of the policy file (transfer.policy_file); NULL: none */
    const char *intent;    /* what they are for, by which rules of that file choose a transport; NULL: nothing */
    const char *notify_name; /* with `notify_msg`, what applications there are told once all is done; NULL: nothing */
    const char *notify_msg;
} millstream_submit_options_t;

/*
 * Submits requests: all, or none. 0; one of the codes of the original (2: the batch is full, 3: local memory is not
 * registered); or one of these. `options` may be NULL.
 */
int millstream_submit(transfer_engine_t engine, batch_id_t batch_id, const struct transfer_request *entries,
                      size_t count, const struct millstream_submit_options *options);

#define MILLSTREAM_ZERO_LENGTH 1001           /* a request of no bytes */
#define MILLSTREAM_OVERFLOW 1002              /* beyond the end of the address space */
#define MILLSTREAM_UNKNOWN_SEGMENT 1003       /* the segment is not open */
#define MILLSTREAM_TARGET_OUT_OF_RANGE 1004   /* not within a buffer of the segment */
#define MILLSTREAM_RESTARTED 1005             /* the target is another process by now: look up its buffers again */
#define MILLSTREAM_TARGET_NOT_ACCESSIBLE 1006 /* that buffer is not for others */
#define MILLSTREAM_NO_PATH 1007               /* no transport leads there */
#define MILLSTREAM_NOT_SERVED 1008            /* not by the transports that may do it */
#define MILLSTREAM_UNKNOWN_TRANSPORT 1009     /* `transport` names none */
#define MILLSTREAM_HINT_NOT_ALLOWED 1010      /* `transport` is none of those of `policy` */
#define MILLSTREAM_UNKNOWN_POLICY 1011        /* the policy file has no such class */
#define MILLSTREAM_DEADLINE_PASSED 1012       /* it was over before */
#define MILLSTREAM_DEADLINE_INFEASIBLE 1013   /* the rails cannot carry it in time */
#define MILLSTREAM_OVERLOADED 1014            /* more than the policy file allows is in flight: later */
#define MILLSTREAM_OVER_LIMIT 1015            /* more than the policy file ever allows: in parts */
#define MILLSTREAM_UNKNOWN_INTENT 1016        /* no rule of the policy file is for such an intent */
#define MILLSTREAM_NOT_DURABLE 1017           /* `durable`, and not by the transport that leads there: no file */

/* Where a server has a file that is offered here. */
typedef struct millstream_local_path {
    const char *server; /* its name: one word, that of its setting nvmeof.server_name */
    const char *path;   /* begins with / */
} millstream_local_path_t;

/* How a file is offered. All zero but for `size`: the whole of it, for reading, by its name on disk. */
typedef struct millstream_file_options {
    size_t size;      /* sizeof(struct millstream_file_options) */
    const char *name; /* what it is called in the segment's name: one line without slashes; NULL: as on disk */
    uint64_t length;  /* so many bytes, from its start; 0: all. A shorter file that is writable becomes so long */
    const millstream_local_path_t *local_paths; /* servers that may open it themselves (their setting */
    size_t local_path_count;                    /* nvmeof.mapped_folders), each once, and how many there are */
    int writable;     /* 1: it may be written, too; 0: no */
} millstream_file_options_t;

/*
 * Offers a file or a block device to peers, as a segment of its own, and writes the segment's name, by which they open
 * it, with a zero behind it. Offsets in the file take the place of addresses there. Whoever can open the segment can read
 * the file, and write it if it is offered so. The engine has the transport "nvmeof". 0, or the negative of a code, and
 * nothing is offered: 1 (also where the file cannot be opened; or the name does not fit, so that it is taken back), 7 (one of
 * that name is offered), 202 (no transport nvmeof)... `options` may be NULL.
 */
int millstream_register_file(transfer_engine_t engine, const char *path, const struct millstream_file_options *options,
                             char *segment_out, size_t segment_len);

/* Takes back the file that is this segment. Returns once nobody reads or writes it any more. */
int millstream_unregister_file(transfer_engine_t engine, const char *segment_name);

#ifdef __cplusplus
}
#endif

#endif
