/* Many threads use the same engine, and it is destroyed amid their calls: codes, and nothing of memory that is gone. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define THREADS 10
#define LENGTH 65536

static transfer_engine_t target, initiator;
static segment_id_t segment;
static char *remote, *local;
static atomic_int destroyed, done;

/* Own ranges: every byte is checked. */
static void *work(void *argument)
{
    size_t number = (size_t)(uintptr_t)argument;
    char *source = local + number * LENGTH, *at = remote + number * LENGTH;
    for (int round = 1; round <= 100; round++) {
        memset(source, round + (int)number, LENGTH);
        CHECK(transfer(initiator, OPCODE_WRITE, source, segment, at, LENGTH) == STATUS_COMPLETED);
        CHECK(memcmp(source, at, LENGTH) == 0);
        memset(source, 0, LENGTH);
        CHECK(transfer(initiator, OPCODE_READ, source, segment, at, LENGTH) == STATUS_COMPLETED);
        CHECK(memcmp(source, at, LENGTH) == 0);
    }
    return NULL;
}

/* Until the engine is gone: each call is done, or is refused because it is. */
static void *work_until_destroyed(void *argument)
{
    size_t number = (size_t)(uintptr_t)argument;
    char *source = local + number * LENGTH;
    uint64_t at = (uint64_t)(uintptr_t)(remote + number * LENGTH);
    for (;;) {
        int was_destroyed = atomic_load(&destroyed);
        batch_id_t batch = allocateBatchID(initiator, 4);
        struct transfer_request request = {OPCODE_WRITE, source, segment, at, LENGTH};
        struct transfer_status status = {0, 0};
        int code = submitTransfer(initiator, batch, &request, 1);
        int asked = getTransferStatus(initiator, batch, 0, &status);
        int waited = millstream_wait_batch(initiator, batch, LONG_MS);
        int freed = freeBatchID(initiator, batch);
        if (was_destroyed) {
            CHECK(batch == INVALID_BATCH && code == 1 && asked == 1 && waited == -1 && freed == 1);
            return NULL;
        }
        CHECK(code == 0 || code == 1 || code == 202);
        CHECK(freed == 0 || freed == 1 || code != 0);
        atomic_fetch_add(&done, 1);
    }
}

static void run(void *(*body)(void *), pthread_t *threads)
{
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, body, (void *)(uintptr_t)i) == 0);
}

static void join(pthread_t *threads)
{
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Waits for a batch that takes minutes. */
static void *wait_long(void *argument)
{
    batch_id_t batch = *(batch_id_t *)argument;
    atomic_store(&done, 1);
    int code = millstream_wait_batch(initiator, batch, 10 * LONG_MS);
    /* -1 if the engine was gone before this had begun. */
    CHECK(code == -202 || code == -1);
    return NULL;
}

/* Who waits does not hold up who destroys. */
static void destroyed_while_one_waits(const char *protocol)
{
    enum { COUNT = 100000 };
    size_t length = THREADS * LENGTH;
    struct transfer_request *requests = calloc(COUNT, sizeof *requests);
    pthread_t thread;
    local = calloc(1, length);
    CHECK(requests && local);
    initiator = new_engine(protocol);
    CHECK(registerLocalMemory(initiator, local, length, "*", 1) == 0);
    segment = open_other(initiator, target);
    for (size_t i = 0; i < COUNT; i++)
        requests[i] = (struct transfer_request){OPCODE_WRITE, local, segment, (uint64_t)(uintptr_t)remote, length};
    batch_id_t batch = allocateBatchID(initiator, COUNT);
    atomic_store(&done, 0);
    CHECK(submitTransfer(initiator, batch, requests, COUNT) == 0);
    CHECK(pthread_create(&thread, NULL, wait_long, &batch) == 0);
    while (!atomic_load(&done))
        ;
    time_t begun = time(NULL);
    destroyTransferEngine(initiator);
    CHECK(time(NULL) - begun < 20);
    CHECK(pthread_join(thread, NULL) == 0);
    free(local);
    free(requests);
}

int main(int argc, char **argv)
{
    const char *protocol = argc > 1 ? argv[1] : "tcp";
    pthread_t threads[THREADS];
    remote = calloc(THREADS, LENGTH);
    CHECK(remote);
    target = new_engine(protocol);
    CHECK(registerLocalMemory(target, remote, THREADS * LENGTH, "*", 1) == 0);
    for (int round = 0; round < 5; round++) {
        local = calloc(THREADS, LENGTH);
        CHECK(local);
        initiator = new_engine(protocol);
        CHECK(registerLocalMemory(initiator, local, THREADS * LENGTH, "*", 1) == 0);
        segment = open_other(initiator, target);
        if (round == 0) {
            run(work, threads);
            join(threads);
        }
        atomic_store(&destroyed, 0);
        atomic_store(&done, 0);
        run(work_until_destroyed, threads);
        while (atomic_load(&done) < 100 * round)
            ;
        destroyTransferEngine(initiator);
        free(local);
        atomic_store(&destroyed, 1);
        join(threads);
    }
    destroyed_while_one_waits(protocol);
    destroyTransferEngine(target);
    free(remote);
    return 0;
}
