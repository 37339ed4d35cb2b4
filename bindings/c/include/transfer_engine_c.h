/*
 * The C API of Mooncake's transfer engine, as Millstream has it: a program that was written for that one is compiled
 * and linked with this one without a change. Names, structures and numbers are those of the original; what the
 * functions do is said here and in docs/c.md. What is ours alone is in millstream.h.
 *
 * All functions may be called from any thread. Handles are numbers, and never used again: one that is wrong, was
 * freed, or is of another engine is an error, and so is null. A text that is passed is not needed after the call.
 *
 * Functions on batches and transfers return 0 or one of the positive numbers below; all others that return int, 0 or the
 * negative of one. millstream_last_error() in millstream.h says why in words.
 *
 *     1  invalid argument          101  a host's name has no address
 *     2  too many                  102  a peer does not answer, or a port is taken
 *     3  memory is not registered  103  a descriptor is malformed
 *     4  the batch is busy         200  metadata: no such segment, or it cannot be asked
 *     6  no such device            201  the peer's process was restarted
 *     7  memory overlaps           202  it cannot be done in this state, or a device failed
 *     8  no transport leads there  302  out of memory
 */
#ifndef MILLSTREAM_TRANSFER_ENGINE_C_H
#define MILLSTREAM_TRANSFER_ENGINE_C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define segment_handle_t int32_t
#define segment_id_t int32_t
#define batch_id_t uint64_t

/* The segment of the engine itself. */
#define LOCAL_SEGMENT (0)
/* What allocateBatchID gives when it fails. */
#define INVALID_BATCH UINT64_MAX

#define OPCODE_READ (0)  /* from the target to the source */
#define OPCODE_WRITE (1) /* from the source to the target */

#define STATUS_WAITING (0)   /* nothing was sent yet */
#define STATUS_PENDING (1)   /* under way */
#define STATUS_INVALID (2)
#define STATUS_CANCELED (3)
#define STATUS_COMPLETED (4) /* every byte is where it should be, at the target for a WRITE */
#define STATUS_TIMEOUT (5)
#define STATUS_FAILED (6)    /* millstream_last_error() says why, after getTransferStatus */

/* An engine, and a transport of one. */
typedef void *transfer_engine_t;
typedef void *transport_t;

struct transfer_request {
    int opcode;
    void *source;           /* local memory: where a WRITE comes from and a READ goes to */
    segment_id_t target_id; /* an open segment */
    uint64_t target_offset; /* an address in the target's process; in a file, an offset */
    uint64_t length;        /* with 0 the request is COMPLETED at once */
};
typedef struct transfer_request transfer_request_t;

struct transfer_status {
    int status;                 /* one of STATUS_* */
    uint64_t transferred_bytes; /* at least so many have arrived */
};
typedef struct transfer_status transfer_status_t;

struct buffer_entry {
    void *addr;
    size_t length;
};
typedef struct buffer_entry buffer_entry_t;

struct notify_msg {
    char *name;
    char *msg;
};
typedef struct notify_msg notify_msg_t;

struct nic_load_stat {
    char device_name[64];
    uint64_t inflight_bytes;   /* not measured: 0 */
    double ewma_bandwidth_bps; /* not measured: 0 */
};
typedef struct nic_load_stat nic_load_stat_t;

/* Used by no function; here because the original's header has it. */
struct segment_desc {
    int type;
    union {
        struct {
            void *addr;
            uint64_t size;
            const char *location;
        } rdma;
        struct {
            const char *file_path;
            const char *subsystem_name;
            const char *proto;
            const char *ip;
            uint64_t port;
        } nvmeof;
    } desc_;
};
typedef struct segment_desc segment_desc_t;

/*
 * Engines.
 */

/*
 * An engine, or NULL. metadata_conn_string is "P2PHANDSHAKE" or the URI of a metadata server (http, etcd, redis,
 * memcached). local_server_name is what its segment is called at a server; with P2PHANDSHAKE its host counts, and the
 * engine's name is that and the port that it finds. ip_or_host_name is where peers reach an engine that uses a server;
 * MC_TCP_BIND_ADDRESS comes first. rpc_port is not used. Where auto_discover is not 0, transports are installed as the
 * machine has them.
 */
transfer_engine_t createTransferEngine(const char *metadata_conn_string, const char *local_server_name,
                                       const char *ip_or_host_name, uint64_t rpc_port, int auto_discover);

/*
 * Ends an engine: its transfers, its registrations and its batches. Returns once other calls on it have, and nothing
 * touches its memory any more; what was sent may still arrive at peers.
 */
void destroyTransferEngine(transfer_engine_t engine);

/* Nothing to do: NICs are looked for when the transport rdma is installed. */
int discoverTopology(transfer_engine_t engine);

/* Writes "host:port", where the engine answers its peers; with P2PHANDSHAKE, the name of its segment. */
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

/* When the process ends by exit, SIGTERM or SIGINT, peers and metadata servers are told first. */
void enableGracefulShutdown(transfer_engine_t engine);

/*
 * Transports.
 */

/*
 * Installs "tcp", "rdma", "shm", "nvmeof" or "relay"; NULL when that fails. At any time, "relay" after the others.
 * For rdma, args may be an array whose first element is the text of a priority matrix, which names the devices to
 * use: {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}. A relay is asked where no transport before it leads: those that the
 * setting tcp.relays (MILLSTREAM_RELAYS) names.
 */
transport_t installTransport(transfer_engine_t engine, const char *proto, void **args);

/* Nothing to do: a transport goes with its engine. */
int uninstallTransport(transfer_engine_t engine, const char *proto);

/*
 * Segments.
 */

/* The number of a peer's segment, or -1. */
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);

/* The same, and asks for its descriptor again if it is open already. */
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);

/* Closes it, when it was closed as often as it was opened. */
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);

/* Closes the segment of this name, however often it was opened. */
int removeLocalSegment(transfer_engine_t engine, const char *segment_name);

/* Asks for the descriptors of all open segments again. */
int syncSegmentCache(transfer_engine_t engine);

/* Nothing to do: connections are made early enough. */
int warmupEfaSegment(transfer_engine_t engine, const char *segment_name);

/*
 * Memory. It must stay where it is until it is unregistered or the engine is destroyed.
 */

/* location is where it is, as "cpu:0", or "*" or NULL. Peers can access it if remote_accessible is not 0. */
int registerLocalMemory(transfer_engine_t engine, void *addr, size_t length, const char *location,
                        int remote_accessible);

/* Returns once nothing touches it any more. */
int unregisterLocalMemory(transfer_engine_t engine, void *addr);

/* All of them, or none. Peers can access them. */
int registerLocalMemoryBatch(transfer_engine_t engine, buffer_entry_t *buffer_list, size_t buffer_len,
                             const char *location);

/* As many as can be; the first error. */
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

/*
 * Transfers.
 */

/* A batch for 1 to 1048576 requests in all, or INVALID_BATCH. */
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);

/* Adds requests to a batch and begins to do them: all, or none. Their tasks are numbered from 0, as they were added. */
int submitTransfer(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries, size_t count);

/* The same; once all of these are COMPLETED, the applications at their targets get a message. */
int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request *entries,
                             size_t count, notify_msg_t notify_msg);

/* How a task stands. Whoever asks makes progress, too; millstream_wait_batch() waits. */
int getTransferStatus(transfer_engine_t engine, batch_id_t batch_id, size_t task_id, struct transfer_status *status);

/* Frees a batch, whose tasks must have ended. */
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/*
 * Messages.
 */

/* The messages that have come, to be freed by freeNotifsMsgBuf, and how many; NULL when there are none. */
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);

int freeNotifsMsgBuf(notify_msg_t *msg, int size);

/* Sends a message to the application at a segment, and waits until it is there. */
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

/*
 * Reports.
 */

/* The names of the NICs: as many as *count says that there is place for, and then how many there are. */
int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t *stats, size_t *count);

/* Writes a text about NICs, transports and open segments, as JSON if json is not 0. */
int showLinks(transfer_engine_t engine, char *buf_out, size_t buf_len, int json);

#ifdef __cplusplus
}
#endif

#endif
