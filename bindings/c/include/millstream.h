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

#ifdef __cplusplus
}
#endif

#endif
