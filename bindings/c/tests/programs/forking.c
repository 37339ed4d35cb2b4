/* A process forks while its threads transfer: each child has codes for the engines of the other at once, and makes
 * engines of its own, which transfer. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 8
#define FORKS 50
#define LENGTH ((size_t)1 << 20)
/* A child that takes so long hangs. */
#define CHILD_SECONDS 30

static transfer_engine_t target, initiator;
static segment_id_t segment;
static batch_id_t batch;
static char *remote, *local;
static atomic_int over;

/* Batches come and go, names are looked up, and engines are looked for: that takes every lock that there is. */
static void *work(void *argument)
{
    size_t number = (size_t)(uintptr_t)argument, part = LENGTH / THREADS;
    while (!atomic_load(&over)) {
        char name[256];
        CHECK(getLocalIpAndPort(target, name, sizeof name) == 0);
        char *source = local + number * part, *at = remote + number * part;
        CHECK(transfer(initiator, OPCODE_WRITE, source, segment, at, part) == STATUS_COMPLETED);
        CHECK(openSegment(initiator, "localhost:1") == -1);
        transfer_engine_t other = new_engine("tcp");
        destroyTransferEngine(other);
    }
    return NULL;
}

static void inherited(void)
{
    char text[256];
    struct transfer_status status;
    struct transfer_request request = {OPCODE_WRITE, local, segment, (uint64_t)(uintptr_t)remote, 8};
    CHECK(getLocalIpAndPort(initiator, text, sizeof text) == -202);
    CHECK(strstr(millstream_last_error(), "forked"));
    CHECK(openSegment(initiator, "127.0.0.1:1") == -1);
    CHECK(registerLocalMemory(initiator, text, sizeof text, "*", 1) == -202);
    CHECK(unregisterLocalMemory(initiator, local) == -202);
    CHECK(allocateBatchID(initiator, 1) == INVALID_BATCH);
    CHECK(submitTransfer(initiator, batch, &request, 1) == 202);
    CHECK(getTransferStatus(initiator, batch, 0, &status) == 202);
    CHECK(millstream_wait_batch(initiator, batch, 1000) == -202);
    CHECK(freeBatchID(initiator, batch) == 202);
    destroyTransferEngine(initiator);
    destroyTransferEngine(target);
}

static void own(const char *protocol)
{
    char *from = malloc(LENGTH), *to = calloc(1, LENGTH);
    CHECK(from && to);
    memset(from, getpid() % 255 + 1, LENGTH);
    transfer_engine_t there = new_engine(protocol), here = new_engine(protocol);
    CHECK(registerLocalMemory(there, to, LENGTH, "*", 1) == 0);
    CHECK(registerLocalMemory(here, from, LENGTH, "*", 1) == 0);
    char name[256], *port;
    CHECK(getLocalIpAndPort(there, name, sizeof name) == 0);
    port = strrchr(name, ':');
    CHECK(port);
    /* By a name, which the resolver of this process looks up. */
    char by_name[300];
    snprintf(by_name, sizeof by_name, "localhost%s", port);
    segment_id_t opened = openSegment(here, by_name);
    CHECK(opened > 0);
    CHECK(transfer(here, OPCODE_WRITE, from, opened, to, LENGTH) == STATUS_COMPLETED);
    CHECK(memcmp(from, to, LENGTH) == 0);
    batch_id_t waited = allocateBatchID(here, 1);
    struct transfer_request request = {OPCODE_READ, from, opened, (uint64_t)(uintptr_t)to, LENGTH};
    CHECK(submitTransfer(here, waited, &request, 1) == 0);
    CHECK(millstream_wait_batch(here, waited, LONG_MS) == 0);
    CHECK(freeBatchID(here, waited) == 0);
    enableGracefulShutdown(there); /* It is destroyed at the exit. */
    destroyTransferEngine(here);
    free(from);
}

static void child(void)
{
    alarm(CHILD_SECONDS);
    inherited();
    own("tcp");
    own("shm");
    exit(0);
}

int main(void)
{
    pthread_t threads[THREADS];
    remote = calloc(1, LENGTH);
    local = calloc(1, LENGTH);
    CHECK(remote && local);
    target = new_engine("tcp");
    initiator = new_engine("tcp");
    CHECK(registerLocalMemory(target, remote, LENGTH, "*", 1) == 0);
    CHECK(registerLocalMemory(initiator, local, LENGTH, "*", 1) == 0);
    segment = open_other(initiator, target);
    batch = allocateBatchID(initiator, 1);
    enableGracefulShutdown(initiator);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0);
    for (int i = 0; i < FORKS; i++) {
        int status = 0;
        pid_t forked = fork();
        CHECK(forked >= 0);
        if (forked == 0)
            child();
        CHECK(waitpid(forked, &status, 0) == forked);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "child %d of %d ended with %#x\n", i, FORKS, (unsigned)status);
            return 1;
        }
    }
    atomic_store(&over, 1);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(freeBatchID(initiator, batch) == 0);
    destroyTransferEngine(initiator);
    destroyTransferEngine(target);
    return 0;
}
