/* What the test programs share: a check that says where it fails, engines, and one transfer. */
#ifndef CHECK_H
#define CHECK_H

#include <millstream.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__,          \
                    #condition, millstream_last_error());                                        \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

/* Longer than anything here takes, unless it hangs. */
#define LONG_MS 60000

static inline transfer_engine_t new_engine(const char *protocol)
{
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1:12345", "127.0.0.1", 12345, 0);
    CHECK(engine);
    CHECK(installTransport(engine, protocol, NULL));
    return engine;
}

static inline segment_id_t open_other(transfer_engine_t engine, transfer_engine_t other)
{
    char name[256];
    CHECK(getLocalIpAndPort(other, name, sizeof name) == 0);
    segment_id_t segment = openSegment(engine, name);
    CHECK(segment > 0);
    return segment;
}

/* How the first task of a batch ended. */
static inline int ended(transfer_engine_t engine, batch_id_t batch, size_t task)
{
    struct transfer_status status = {-1, 0};
    do {
        CHECK(getTransferStatus(engine, batch, task, &status) == 0);
    } while (status.status == STATUS_WAITING || status.status == STATUS_PENDING);
    return status.status;
}

/* Does one request, and says how it ended. */
static inline int transfer(transfer_engine_t engine, int opcode, void *source, segment_id_t target, const void *at,
                           uint64_t length)
{
    struct transfer_request request = {opcode, source, target, (uint64_t)(uintptr_t)at, length};
    batch_id_t batch = allocateBatchID(engine, 1);
    CHECK(batch != INVALID_BATCH);
    CHECK(submitTransfer(engine, batch, &request, 1) == 0);
    int status = ended(engine, batch, 0);
    CHECK(freeBatchID(engine, batch) == 0);
    return status;
}

#endif
